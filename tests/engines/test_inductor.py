"""torch.compile in whole runs: graphs that ran are counted, and what was not compiled."""

import json
import shutil

import pytest

from tests.conftest import TINY, end_of, python, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.fixture(autouse=True)
def _no_folder_of_the_tests_own_process(monkeypatch):
    """torch sets it where something was captured, and a person's wins over the flag."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("inductor") / "cache"


def test_the_workers_of_one_machine_compile_the_model_whole(tmp_path, cache):
    """Cut where DDP's buckets end it would be traced at every start."""
    result = run(
        *TINY, "--model=tests.nets:of_two_buckets", "--engine=inductor", "--data=synthetic",
        "--nproc_per_node=2", f"--inductor.cache_dir={cache}", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path).num_graphs == 1
    assert "DDPOptimizer" not in result.stdout


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
