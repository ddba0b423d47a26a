"""What a run does when the loss is not finite, gradients overflow, or memory is out."""

import pytest

from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, run

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


@pytest.mark.parametrize("engine", ["ddp", "xla"])
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


@pytest.mark.parametrize("engine", ["ddp", "xla"])
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
    result = run("accbench", "compare", *TINY, "--on_oom=halve", script="-m")
    assert result.returncode == 2
    assert "compare measures what was asked for" in result.stderr
