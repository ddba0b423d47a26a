"""The float64 reference as a command that can fail."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from accbench.report import run as runs
from tests.conftest import HANG_S, ROOT, TINY, end_of, small_disk


def test_a_full_disk_is_told_in_a_line(tmp_path):
    with small_disk(tmp_path / "disk", "100k"):
        run_dir = tmp_path / "disk" / "run"
        done = subprocess.run(
            [sys.executable, "-m", "accbench.comparing.numerics", "reference", "1", *TINY,
             "--data=synthetic", "--device=cpu", "--max_steps=200", f"--output_dir={run_dir}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_reference_trains_all_shards_in_one_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "accbench.comparing.numerics", "reference", "3", *TINY,
         "--data=synthetic", "--device=cpu", "--max_steps=2", f"--output_dir={tmp_path}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path).num_steps == 2
    kept = sorted(path.name for path in (tmp_path / "reference").iterdir())
    assert kept == [
        "facts.json", "start.safetensors", "step-0000.safetensors", "step-0001.safetensors",
    ]  # fmt: skip


def test_free_runs_are_drawn_in_a_pass_of_their_own(tmp_path):
    def phases(part: str, argument: str, name: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "accbench.comparing.numerics", part, argument, *TINY,
             "--data=synthetic", "--device=cpu", "--max_steps=2",
             f"--output_dir={tmp_path / name}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [record.phase for record in runs.read(tmp_path / name).numerics]

    phases("reference", "1", "reference")
    reference = str(tmp_path / "reference")
    assert not {"noise of free", "noise of free end"} & {*phases("floor", reference, "plain-ddp")}
    drawn = phases("free_draws", reference, "plain-ddp-free-draws")
    assert drawn == ["start", *(["noise of free"] * 2 + ["noise of free end"]) * 2]


NEEDS_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
LANGUAGE = ("--seq_len=16", "--workers=0", "--threads=1", "--device=cpu", "--amp_level=O0",
            "--max_steps=2", f"--data=tokens:{ROOT / 'docs' / 'architecture.md'}")  # fmt: skip


def make_pass(folder, part: str, argument: str, *flags: str) -> tuple:
    done = subprocess.run(
        [sys.executable, "-m", "accbench.comparing.numerics", part, argument, *LANGUAGE, *flags,
         f"--output_dir={folder}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return runs.read(folder).numerics


def test_a_shared_batch_is_that_of_the_workers_that_share_it(tmp_path):
    model = "--model=llama_tiny"  # which drops nothing
    apart = make_pass(tmp_path / "apart", "reference", "4", model, "--batch_size=1")
    shared = make_pass(tmp_path / "shared", "reference", "2x2", model, "--batch_size=2")
    assert [r.loss for r in shared] == pytest.approx([r.loss for r in apart], rel=1e-12)


@pytest.fixture(scope="module")
def shared_reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "reference"
    make_pass(folder, "reference", "1x2", "--model=gpt2_tiny", "--batch_size=4")
    return folder


@pytest.mark.parametrize("flags", [
    ("--tp=2",), ("--cp=2", "--accumulate=2"), ("--pp=2", "--accumulate=2"),
    pytest.param(("--tp=2", "--engine=jax"), marks=[pytest.mark.soak, NEEDS_JAX]),
    pytest.param(("--cp=2", "--engine=jax"), marks=[pytest.mark.soak, NEEDS_JAX]),
])  # fmt: skip
def test_workers_that_share_a_batch_train_as_float64_does(tmp_path, shared_reference, flags):
    found = make_pass(
        tmp_path / "check", "check", str(shared_reference), "--model=gpt2_tiny",
        "--batch_size=4", "--nproc_per_node=2", *flags,
    )  # fmt: skip
    phases = {record.phase: record for record in found}
    assert phases.keys() == {
        "start", "without dropout", "step", "evaluation", "free", "free end", "own dropout"
    }  # fmt: skip
    for record in found:
        assert not record.note
        assert not record.ranks_apart
        assert record.distances.get("dropout calls", 0) == 0
        if record.phase in ("step", "evaluation", "free"):
            assert record.distances["loss"] < 1e-6
        if record.phase == "step":
            assert record.distances["gradient"] < 1e-5
            assert abs(record.distances["scale"]) < 1e-5
    assert phases["free end"].distances["parameters"] < 0.01
