"""TensorBoard reads what a run has written for it."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, run, small_disk


def test_scalars_and_samples(images, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, f"--data=imagefolder:{images}", f"--output_dir={run_dir}", "--ema_decay=0.5",
             "--lr_schedule=linear", "--tensorboard=auto", "--epochs=2")  # fmt: skip
    for more in (("--max_steps=10",), ("--max_steps=14", "--resume=auto")):
        result = run(*flags, *more)
        assert result.returncode == 0, result.stderr
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()

    def read(name: str) -> list[tuple[int, float]]:
        return [(scalar.step, scalar.value) for scalar in board.Scalars(name)]

    windows = of_kind(run_dir, records.WindowRecord)
    ends = [window.first_step + window.num_steps for window in windows]
    assert ends[-1] == 14
    for name, field in (("train/loss", "mean_loss"), ("train/learning_rate", "lr")):
        expected = [pytest.approx(getattr(window, field)) for window in windows]
        assert read(name) == list(zip(ends, expected, strict=True)), name
    assert windows[0].lr > windows[-1].lr > 0
    steady = [window for window in windows if not window.warmup]
    assert [value for _, value in read("speed/samples_per_s")] == [
        pytest.approx(window.num_samples / window.wall_s) for window in steady
    ]
    evaluations = of_kind(run_dir, records.EvalRecord)
    assert read("eval/top1") == [(12, pytest.approx(e.top1)) for e in evaluations[:1]]
    assert read("eval_averaged/loss") == [(12, pytest.approx(e.loss)) for e in evaluations[1:]]
    (samples,) = board.Images("samples")  # once, also of a run that went on
    assert (samples.width, samples.height) == (4 * 32, 32)
    assert samples.step == 0


def test_none_where_it_is_not_wanted(tmp_path):
    run_dir = tmp_path / "run"
    result = run(*TINY, "--data=synthetic", f"--output_dir={run_dir}", "--tensorboard=off")
    assert result.returncode == 0, result.stderr
    assert end_of(run_dir).status == "ok"
    assert not (run_dir / "tensorboard").exists()


def test_a_full_disk_ends_the_board_alone(tmp_path):
    """The folder is a disk of its own; training goes on, and there is no traceback."""
    folder = tmp_path / "run" / "tensorboard"
    folder.parent.mkdir()
    with small_disk(folder, "8k"):
        result = run(*TINY, "--data=synthetic", "--max_steps=80", "--log_interval=1",
                     "--tensorboard=on", f"--output_dir={folder.parent}")  # fmt: skip
    assert result.returncode == 0
    assert not result.stderr
    assert result.stdout.count("TensorBoard events end here: cannot write") == 1
    assert end_of(folder.parent).num_steps == 80
