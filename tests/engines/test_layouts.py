"""Models that cannot have their images in channels_last train all the same."""

import pytest

from accbench.recording import records
from tests.conftest import of_kind, run
from tests.engine_params import NEEDS_COMPILER

FLAGS = (
    "--model=tests.nets:joined", "--image_size=16", "--data=synthetic", "--batch_size=4",
    "--amp_level=O0", "--device=cpu", "--max_steps=4", "--log_interval=1", "--warmup_steps=1",
    "--tensorboard=off", "--threads=1", "--lr=1e-2",
)  # fmt: skip


# Of two workers DDP's wrapper is called first, of one alone the compiled model itself.
@pytest.mark.parametrize(("engine", "num_workers"), [
    ("ddp", 2),
    pytest.param("inductor", 1, marks=NEEDS_COMPILER),
    pytest.param("inductor", 2, marks=[NEEDS_COMPILER, pytest.mark.soak]),
])  # fmt: skip
def test_channels_and_pixels_joined_by_view_are_as_without_channels_last(
    engine, num_workers, tmp_path
):
    losses = []
    for name, more in (("asked", [f"--{engine}.no-channels_last"]), ("found", [])):
        flags = (*FLAGS, f"--nproc_per_node={num_workers}", f"--engine={engine}", *more)
        done = run(*flags, f"--output_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        assert (f"--{engine}.no-channels_last" in done.stderr + done.stdout) == (name == "found")
        assert "Cannot view" not in done.stderr
        losses.append([w.loss for w in of_kind(tmp_path / name, records.WindowRecord)])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
