"""Batches that come in ever other shapes: named, counted, and refused where that is asked for."""

import importlib.util

import pytest
import torch

from accbench.training.shapes import ShapeWatch
from tests.conftest import end_of, run

RAGGED = (
    "--model=tests.nets:Ragged", "--data=synthetic", "--synthetic.num_batches=14", "--device=cpu",
    "--amp_level=O0", "--max_steps=14", "--warmup_steps=2", "--log_interval=4", "--threads=1",
    "--workers=0", "--tensorboard=off", "--save_interval=0",
)  # fmt: skip


def test_what_changed_is_named():
    watch = ShapeWatch()
    for length in (8, 8, 6, 8, 6):
        watch.note({"tokens": torch.zeros(2, length), "labels": torch.zeros(2)})
    assert watch.changes == ["batch['tokens'] was (2, 8) and is (2, 6)"]
    assert watch.num_seen == 2
    watch.note({"tokens": torch.zeros(2, 6, dtype=torch.int64), "mask": torch.zeros(2)})
    assert watch.changes[1] == (
        "batch['tokens'] was (2, 6) and is (2, 6) (torch.float32, then torch.int64), "
        "batch['mask'] of shape (2,) is new, batch['labels'] is missing"
    )


def test_where_no_input_changed_that_is_said():
    watch = ShapeWatch()
    for _ in range(2):
        watch.note((torch.zeros(2),))
    assert "no input changed its shape" in watch.causes()


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="needs torch_xla")
def test_recompilations_beyond_the_limit_end_the_run_with_their_cause(tmp_path):
    result = run(
        *RAGGED, "--engine=xla", "--max_recompiles=3", f"--output_dir={tmp_path / 'refused'}"
    )
    assert result.returncode != 0
    line = result.stderr.splitlines()[-1]
    assert "graphs were compiled after the warm-up, --max_recompiles 3" in line
    assert "batch['vectors']['of 8'] was (" in line


def test_inductor_compiles_for_any_size_where_it_is_asked_to(tmp_path):
    result = run(
        *RAGGED, "--engine=inductor", "--inductor.dynamic=on", "--max_recompiles=0",
        f"--output_dir={tmp_path / 'dynamic'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    end = end_of(tmp_path / "dynamic")
    assert end.num_compiles > 0
    assert end.num_recompiles == 0
    assert len(end.shape_changes) == 5  # the first few of them
