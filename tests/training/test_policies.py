"""What a run does when the loss is not finite, gradients overflow, or memory is out."""

import dataclasses
import json
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from accbench.config import TaskConfig
from accbench.errors import NonFiniteLossError
from accbench.recording import records
from accbench.training import checkpoint_file, checkpoints
from accbench.training.run_report import Reporter
from tests.conftest import TINY, end_of, of_kind, run
from tests.engine_params import NEEDS_XLA, XLA
from tests.report import fakes

# Two workers, six steps an epoch.
STEPS = 16
LEARNING = (
    *TINY, "--model=tests.nets:wrong_at", "--nproc_per_node=2", f"--max_steps={STEPS}",
    "--warmup_steps=1", "--log_interval=1", "--epochs=9",
)  # fmt: skip


@pytest.fixture
def learn(images, tmp_path, monkeypatch):
    """Run a net that goes wrong in those forward passes; (result, folder)."""

    def start(wrong_at: str, *flags: str):
        monkeypatch.setenv("WRONG_AT", wrong_at)
        run_dir = tmp_path / "run"
        return run(*LEARNING, f"--data=imagefolder:{images}", f"--output_dir={run_dir}", *flags), (
            run_dir
        )

    return start


@pytest.mark.parametrize("engine", ["ddp", XLA])
def test_rolls_back_and_goes_on_behind(learn, engine):
    result, run_dir = learn("8,14", "--on_nan=rollback", "--save_steps=4", f"--engine={engine}")
    assert result.returncode == 0, result.stderr
    first, second = of_kind(run_dir, records.ResumeRecord)
    # The second step of an epoch ended badly: back to the end of the epoch before.
    assert (first.step, first.epoch, first.rolled_back) == (6, 1, True)
    assert (second.step, second.epoch, second.rolled_back) == (10, 2, True)
    assert "back to the weights after step 6, and on behind the 2 steps' data" in result.stdout
    windows = of_kind(run_dir, records.WindowRecord)
    assert [window.first_step for window in windows] == list(range(STEPS))
    assert all(window.loss is not None for window in windows)
    assert end_of(run_dir).status == "ok"
    # Two batches of six are left out in the second epoch, and two in the third.
    assert [window.epoch for window in windows] == [0] * 6 + [1] * 4 + [2] * 4 + [3] * 2


@pytest.mark.parametrize(
    ("engine", "flags"),
    [("ddp", ()), pytest.param("xla", (), marks=[pytest.mark.xla, NEEDS_XLA]),
     ("ddp", ("--optimizer=sgd", "--clip_norm=1", "--accumulate=2"))],
)  # fmt: skip
def test_skips_and_goes_on(learn, engine, flags):
    """The weights and BatchNorm's statistics are those of before the step."""
    wrong_at = "15,16" if flags else "8"  # forward passes on one of two ranks
    flags = (*flags, "--on_nan=skip", "--save_steps=7", "--keep_checkpoints=9", "--lr=1e-4")
    result, run_dir = learn(wrong_at, *flags, f"--engine={engine}")
    assert result.returncode == 0, result.stderr
    assert "gradients were not finite in 1 of these steps, which were skipped; 1 of 3" in (
        result.stdout
    )
    windows = of_kind(run_dir, records.WindowRecord)
    assert [window.first_step for window in windows if window.loss is None] == [7]
    assert len(windows) == STEPS
    assert end_of(run_dir).skipped_steps == 1
    assert all(e.loss is not None for e in of_kind(run_dir, records.EvalRecord))
    before, *_, last = (
        checkpoint_file.read(checkpoints.folder_of(run_dir, step)).state for step in (7, 14, 16)
    )
    for name, tensor in last.model.items():
        assert tensor.isfinite().all(), name
    counts = [name for name in last.model if name.endswith("num_batches_tracked")]
    a_step = 2 if "--accumulate=2" in flags else 1
    for name in counts:
        assert before.model[name] == 7 * a_step
        assert last.model[name] == (STEPS - 1) * a_step


class _Skipping:
    """An engine in float32 that has applied as many steps as a test says."""

    precision = SimpleNamespace(loss_scale=lambda: None)
    num_applied = 0

    def applied_steps(self, _optimizer: torch.optim.Optimizer) -> int:
        return self.num_applied

    def left_compiler(self) -> list[str]:
        return []


def test_steps_that_were_skipped_before_a_resume_are_no_new_ones():
    task = TaskConfig(on_nan="skip", max_skips=3, batch_size=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    engine, display = _Skipping(), SimpleNamespace(window=lambda *_: None)
    reporter = Reporter(SimpleNamespace(write=lambda _: None), display, task, engine, optimizer)
    engine.num_applied = 15
    reporter.restored(20)  # five were skipped, as by float16's loss scale
    of_ten = dataclasses.replace(fakes.window(20, 1.0), mean_loss=1.0)
    engine.num_applied = 25
    reporter.window(of_ten)
    assert reporter.num_skipped == 0
    engine.num_applied = 33
    reporter.window(dataclasses.replace(of_ten, first_step=30, mean_loss=None))
    assert reporter.num_skipped == 2
    engine.num_applied = 43
    with pytest.raises(NonFiniteLossError, match="but the gradients are"):
        reporter.window(dataclasses.replace(of_ten, first_step=40, mean_loss=None))


@pytest.fixture
def one_white(images, tmp_path):
    """Flags of a training set of six batches, one of its images white all over."""
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    first, *_ = sorted((folder / "train").rglob("*.jpg"))
    Image.new("RGB", (64, 64), "white").save(first, "JPEG")
    return (
        *TINY, f"--data=imagefolder:{folder}", "--max_steps=14", "--log_interval=1", "--epochs=9",
        "--batch_size=8", "--on_nan=skip", "--max_skips=9",
    )  # fmt: skip


def test_compiled_steps_are_skipped_as_eager_ones(one_white, tmp_path):
    """The other losses, and those of the averaged weights, are ddp's."""
    found = {}
    for engine in ("ddp", "inductor", *(["jax"] if find_spec("jax") else [])):
        run_dir = tmp_path / engine
        result = run(*one_white, "--model=tests.nets:wrong_on_white", f"--engine={engine}",
                     "--ema_decay=0.9", f"--output_dir={run_dir}")  # fmt: skip
        assert result.returncode == 0, result.stderr
        losses = [window.loss for window in of_kind(run_dir, records.WindowRecord)]
        evaluated = of_kind(run_dir, records.EvalRecord)
        found[engine] = losses, [e.loss for e in evaluated if e.averaged]
        assert end_of(run_dir).skipped_steps == losses.count(None)
    losses, of_averages = found["ddp"]
    assert losses.count(None) >= 2
    assert len(of_averages) == 2
    for own_losses, own_of_averages in found.values():
        assert [loss is None for loss in own_losses] == [loss is None for loss in losses]
        taken = [loss for loss in losses if loss is not None]
        assert [x for x in own_losses if x is not None] == pytest.approx(taken, rel=1e-3)
        assert own_of_averages == pytest.approx(of_averages, rel=1e-3)


def test_loss_that_is_wrong_where_gradients_are_not(one_white, tmp_path):
    result = run(*one_white, "--model=tests.nets:wrong_loss_on_white",
                 f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert result.returncode == 1
    assert "the loss is not finite in one of these steps, but the gradients are" in result.stderr
    assert end_of(tmp_path / "run").status == "nan"


def test_skipping_too_often(learn):
    result, run_dir = learn("3,4,5,6", "--on_nan=skip", "--max_skips=2")
    assert result.returncode == 1
    assert "not finite in 1 of these steps, 3 since the start, --max_skips 2" in result.stderr
    assert end_of(run_dir).status == "nan"
    assert len(of_kind(run_dir, records.WindowRecord)) == 5


def test_rolling_back_where_nothing_is_saved(learn):
    result, run_dir = learn("all", "--on_nan=rollback", "--save_steps=1", "--max_rollbacks=2")
    assert result.returncode == 1
    assert end_of(run_dir).status == "nan"
    assert not of_kind(run_dir, records.ResumeRecord)  # there was nothing to go back to


def test_rolling_back_too_often(learn):
    result, run_dir = learn("3,4,5,6", "--on_nan=rollback", "--save_steps=1", "--max_rollbacks=2")
    assert result.returncode == 1
    assert "the loss is not finite at step 2" in result.stderr
    assert end_of(run_dir).status == "nan"
    assert len(of_kind(run_dir, records.ResumeRecord)) == 2


@pytest.mark.parametrize("engine", ["ddp", XLA])
def test_gradients_that_overflow_in_every_step(tmp_path, engine):
    result = run(*TINY, "--data=synthetic", "--model=tests.nets:overflowing", "--amp_level=O1",
                 "--amp_dtype=float16", "--max_steps=99", "--log_interval=10",
                 f"--engine={engine}", "--nproc_per_node=1",
                 f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert result.returncode == 1
    assert "gradients overflow in step after step, the loss scale is down to" in result.stderr
    end = end_of(tmp_path / "run")
    assert end.status == "nan"
    assert 30 <= end.num_steps <= 42


def test_out_of_memory(tmp_path):
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:hungry", "--nproc_per_node=2")
    told = run(*flags, f"--output_dir={tmp_path / 'told'}")
    assert told.returncode == 1
    assert "out of memory with --batch_size 4 a worker" in told.stderr
    assert "GiB at most until then: lower it, or use --on_oom halve" in told.stderr
    assert end_of(tmp_path / "told").status == "oom"
    halved = run(*flags, f"--output_dir={tmp_path / 'halved'}", "--on_oom=halve")
    assert halved.returncode == 0, halved.stderr
    assert "starting again with --batch_size 2" in halved.stdout
    assert "no checkpoint in" in halved.stdout
    assert end_of(tmp_path / "halved").num_samples == 6 * 2 * 2
    parts = run(*flags, f"--output_dir={tmp_path / 'parts'}", "--on_oom=halve", "--batch_size=10",
                "--accumulate=2", "--nproc_per_node=1")  # fmt: skip
    assert parts.returncode == 0, parts.stderr
    values = json.loads((tmp_path / "parts" / "config.json").read_text())
    assert (values["batch_size"], values["accumulate"]) == (2, 1)  # 5 are not cut in two
    result = run("accbench", "compare", *TINY, "--on_oom=halve", script="-m")
    assert result.returncode == 2
    assert "compare measures what was asked for" in result.stderr


@pytest.mark.parametrize("engine", ["ddp", XLA])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_parameters_that_are_not_trained_count_for_nothing(tmp_path, engine, optimizer):
    result = run(*TINY, "--data=synthetic", "--model=tests.nets:frozen_first", "--on_nan=skip",
                 f"--engine={engine}", f"--optimizer={optimizer}", "--ema_decay=0.9",
                 f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "left out" not in result.stdout
    assert end_of(tmp_path / "run").skipped_steps == 0
