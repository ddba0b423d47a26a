"""The float64 reference as a command that can fail."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from accbench.report import run as runs
from tests.conftest import ROOT, TINY, end_of, python, small_disk

ON_CPU = (*TINY, "--data=synthetic", "--device=cpu", "--max_steps=2")


def numerics(part: str, argument: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Make a part of the pass, with a forked worker."""
    command = ("-m", "accbench.comparing.numerics", part, argument)
    return python("-m", "tests.all_forked", *command, *flags)


def test_a_full_disk_is_told_in_a_line(tmp_path):
    with small_disk(tmp_path / "disk", "100k"):
        run_dir = tmp_path / "disk" / "run"
        flags = (*ON_CPU, "--max_steps=200", f"--output_dir={run_dir}")
        done = numerics("reference", "1", *flags)
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_reference_trains_all_shards_in_one_process(tmp_path):
    done = numerics("reference", "3", *ON_CPU, f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path).num_steps == 2
    kept = sorted(path.name for path in (tmp_path / "reference").iterdir())
    assert kept == [
        "facts.json", "start.safetensors", "step-0000.safetensors", "step-0001.safetensors",
    ]  # fmt: skip


def test_free_runs_are_drawn_in_a_pass_of_their_own(tmp_path):
    def phases(part: str, argument: str, name: str) -> list[str]:
        done = numerics(part, argument, *ON_CPU, f"--output_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        return [record.phase for record in runs.read(tmp_path / name).numerics]

    phases("reference", "1", "reference")
    reference = str(tmp_path / "reference")
    assert not {"noise of free", "noise of free end"} & {*phases("floor", reference, "plain-ddp")}
    drawn = phases("free_draws", reference, "plain-ddp-free-draws")
    assert drawn == ["start", *(["noise of free"] * 2 + ["noise of free end"]) * 2]


HAS_JAX = find_spec("jax") is not None
NEEDS_JAX = pytest.mark.skipif(not HAS_JAX, reason="jax is not installed")
LANGUAGE = ("--seq_len=16", "--workers=0", "--threads=1", "--device=cpu", "--amp_level=O0",
            "--max_steps=2", f"--data=tokens:{ROOT / 'docs' / 'architecture.md'}")  # fmt: skip


def test_a_shared_batch_is_that_of_the_workers_that_share_it(tmp_path):
    def losses(shards: str, batch_size: int) -> list[float]:
        model = "--model=tests.nets:large_ends"  # which drops nothing
        sizes = (model, f"--batch_size={batch_size}", f"--output_dir={tmp_path / shards}")
        done = numerics("reference", shards, *LANGUAGE, *sizes)
        assert done.returncode == 0, done.stdout + done.stderr
        return [record.loss for record in runs.read(tmp_path / shards).numerics]

    apart, shared = losses("4", 1), losses("2x2", 2)
    assert len(apart) == 2
    assert shared == pytest.approx(apart, rel=1e-12)


@pytest.fixture(scope="module")
def shared_passes(request, tmp_path_factory) -> tuple[Path, str]:
    """A folder with the passes that the selected tests ask for, and what their launcher said.

    One launcher makes all, of which the workers are copies: they have transformers already.
    """
    folder = tmp_path_factory.mktemp("shared")
    flags = ("--model=gpt2_tiny", "--batch_size=4", *LANGUAGE)
    reference = folder / "reference"
    passes = [["reference", "1x2", *flags, f"--output_dir={reference}"]]
    for item in request.session.items:
        if getattr(item, "originalname", "") != SHARING:
            continue
        mesh = item.callspec.params["mesh"]
        if HAS_JAX or "--engine=jax" not in mesh:
            own = (*mesh, "--nproc_per_node=2", f"--output_dir={folder / ' '.join(mesh)}")
            passes.append(["check", str(reference), *flags, *own])
    done = python(
        "-m", "tests.all_forked", "--import=transformers:GPT2LMHeadModel",
        "-m", "tests.comparing.several_passes", json.dumps(passes),
    )  # fmt: skip
    return folder, done.stdout + done.stderr


@pytest.mark.parametrize("mesh", [
    ("--tp=2",), ("--cp=2", "--accumulate=2"), ("--pp=2", "--accumulate=2"),
    pytest.param(("--tp=2", "--engine=jax"), marks=[pytest.mark.soak, NEEDS_JAX]),
    pytest.param(("--cp=2", "--engine=jax"), marks=[pytest.mark.soak, NEEDS_JAX]),
])  # fmt: skip
def test_workers_that_share_a_batch_train_as_float64_does(shared_passes, mesh):
    folder, said = shared_passes
    checked = runs.read_if_there(folder / " ".join(mesh))
    assert checked.status == "ok", said
    found = checked.numerics
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


SHARING = test_workers_that_share_a_batch_train_as_float64_does.__name__
