"""`--profile`: traces that Perfetto and XProf open."""

import gzip
import json
from importlib.util import find_spec

import pytest

from tests.conftest import TINY, end_of, run

# A name that is in the compiler's own profile.
OF_COMPILER = {"xla": b"SyncTensorsGraph", "jax": b"ThunkExecutor::Execute"}
STEP = {"jax": "jax.step"}
NEEDS_JAX = pytest.param(
    "jax", marks=pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("xla", marks=pytest.mark.xla), NEEDS_JAX])
def test_steps_are_traced(tmp_path, engine):
    run_dir = tmp_path / "run"
    num_workers = 1 if engine == "jax" else 2  # the others tell their ranks' files apart
    result = run(*TINY, "--data=synthetic", f"--engine={engine}",
                 f"--nproc_per_node={num_workers}", "--max_steps=10", "--profile=3",
                 f"--output_dir={run_dir}")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"profiled 3 steps: {run_dir / 'profile' / 'rank0.json.gz'}" in result.stdout
    assert end_of(run_dir).num_steps == 10
    for rank in range(num_workers):
        with gzip.open(run_dir / "profile" / f"rank{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = [
            e for e in events if e.get("name", "").startswith(STEP.get(engine, "Optimizer.step#"))
        ]
        assert len(steps) == 3
        assert all(step["dur"] > 0 for step in steps)
        if engine in OF_COMPILER:
            (of_xla,) = (run_dir / "profile" / f"xla-rank{rank}").rglob("*.xplane.pb")
            assert OF_COMPILER[engine] in of_xla.read_bytes()


def test_run_too_short_for_a_profile(tmp_path):
    result = run(*TINY, "--data=synthetic", "--max_steps=3", "--profile=3",
                 f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "nothing profiled" in result.stdout


@pytest.mark.parametrize("engine", ["ddp", NEEDS_JAX])
def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, engine):
    (tmp_path / "profile").touch()  # where its folder would be
    result = run(*TINY, "--data=synthetic", f"--engine={engine}", "--max_steps=10", "--profile=3",
                 f"--output_dir={tmp_path}")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path).num_steps == 10
    said = "the compiler's profile" if engine == "jax" else "the profile"
    assert f"{said} could not be written to {tmp_path / 'profile'}" in result.stdout + result.stderr
