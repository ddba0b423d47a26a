"""torch.compile in whole runs: graphs that ran are counted, and what was not compiled."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from accbench.recording import records
from accbench.report import run as runs
from tests.conftest import HANG_S, ROOT, TINY, end_of, of_kind, python, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.fixture(autouse=True)
def _no_folder_of_the_tests_own_process(monkeypatch):
    """torch sets it where something was captured, and a person's wins over the flag."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("inductor") / "cache"


def test_two_workers_compile_once_and_a_second_start_loads_it(tmp_path, cache):
    compiled = []
    for name in ("cold", "warm"):
        result = run(
            *TINY, "--engine=inductor", "--data=synthetic", "--nproc_per_node=2",
            f"--inductor.cache_dir={cache}", f"--output_dir={tmp_path / name}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        end = end_of(tmp_path / name)
        assert (end.status, end.num_recompiles, end.num_fallbacks) == ("ok", 0, 0)
        assert end.num_graphs >= 1
        (kept,) = cache.iterdir()  # a folder a processor
        assert of_kind(tmp_path / name, records.RunRecord)[0].compile_cache == str(kept)
        compiled.append({path for path in cache.rglob("*.so") if "precompiled" not in path.name})
    assert compiled[0]
    assert compiled[1] == compiled[0]
    # the same code on the same batches
    losses = [
        [window.loss for window in runs.read(tmp_path / name).windows] for name in ("cold", "warm")
    ]
    assert losses[0] == losses[1]


def test_the_workers_of_one_machine_compile_the_model_whole(tmp_path, cache):
    """Cut where DDP's buckets end it would be traced at every start."""
    result = run(
        *TINY, "--model=tests.nets:of_two_buckets", "--engine=inductor", "--data=synthetic",
        "--nproc_per_node=2", f"--inductor.cache_dir={cache}", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path).num_graphs == 1
    assert "DDPOptimizer" not in result.stdout


def test_vector_instructions_are_tried_once_a_cache(tmp_path, monkeypatch):
    """In Pythons of their own; torch 2.15 remembers by itself, and 2.8 by our file."""
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)  # our tests' own
    script = """
import subprocess, sys
tried = []
def counted(function):
    def call(command, *args, **kwargs):
        tried.extend([1] * (command[0] == sys.executable))
        return function(command, *args, **kwargs)
    return call
subprocess.check_call, subprocess.run = map(counted, (subprocess.check_call, subprocess.run))
from accbench.engines.inductor import vector_instructions
vector_instructions.pick()
from torch._inductor import cpu_vec_isa
print(len(tried), cpu_vec_isa.pick_vec_isa())
"""
    # Not forked from a process that has tried already.
    first, second = (
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            timeout=HANG_S,
        ).stdout.split()
        for _ in range(2)
    )
    assert int(first[0]) > 0
    assert second[0] == "0"
    assert second[1:] == first[1:] != []


def test_what_is_left_to_eager_pytorch_is_counted(tmp_path, cache):
    result = run(
        *TINY, "--model=tests.nets:not_compiled", "--engine=inductor", "--data=synthetic",
        f"--inductor.cache_dir={cache}", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path).num_fallbacks >= 1


def test_faults_of_inductor_are_mended(cache):
    """What was read before it was written in place, a buffer of one value for 320, and labels that
    end early."""
    done = python("-m", "tests.engines.inductor_faults", cache)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found["kept"]) == 8 * 320
    # of dropout of 0.25
    assert all(value == 0 or value == pytest.approx(4 / 3, rel=1e-3) for value in found["kept"])
    assert 0.15 < found["kept"].count(0.0) / len(found["kept"]) < 0.35
    assert len(found["gradients"]) == len(found["outputs"]) - 1 == 4
    assert max(found["gradients"]) < 1e-5
    assert max(found["outputs"]) < 1e-5


def test_a_cache_that_bfloat16_has_filled_gives_float16_its_own_graphs(tmp_path):
    """AOTAutograd's key knows that autocast is on, and not its type."""
    losses = {}
    for dtype, cache in (("bfloat16", "shared"), ("float16", "shared"), ("float16", "fresh")):
        folder = tmp_path / f"{dtype}-{cache}"
        done = python(
            "-m", "tests.engines.cached_types", dtype, folder,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / cache),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses[folder.name] = json.loads(folder.with_name(f"{folder.name}.json").read_text())
    assert losses["float16-shared"] == losses["float16-fresh"] != losses["bfloat16-shared"]
