"""Whole runs through the scripts, as a person starts them."""

import contextlib
import json
import os
import pty
import re
import subprocess

import pytest

from accbench.data import mock_images
from accbench.recording import records
from tests.conftest import HANG_S, ROOT, TINY, command, end_of, of_kind, python, read, run


def test_two_workers_train_and_evaluate_on_images(images, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--max_steps=100", "--epochs=2", "--lr=0.01")
    result = run(*flags, "--nproc_per_node=2", f"--data=mock:{images}", f"--output_dir={run_dir}")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""

    found = read(run_dir)
    head = found[0]
    assert isinstance(head, records.RunRecord)
    assert (head.engine, head.world_size, head.batch_size) == ("ddp", 2, 4)
    assert (head.device_type, head.collectives, head.amp_dtype) == ("cpu", "process_group", None)
    assert {"python", "torch", "torchvision", "accbench"} <= head.versions.keys()
    assert head.task == {**json.loads((run_dir / "config.json").read_text())}

    windows = of_kind(run_dir, records.WindowRecord)
    # 48 images make 6 steps of 2 x 4 an epoch: windows of 2, warm-up first.
    assert [(w.epoch, w.first_step, w.num_steps) for w in windows] == [
        (0, 0, 2), (0, 2, 2), (0, 4, 2), (1, 6, 2), (1, 8, 2), (1, 10, 2),
    ]  # fmt: skip
    assert [w.warmup for w in windows] == [True] + [False] * 5
    for window in windows:
        assert window.num_samples == 2 * 4 * 2
        assert window.dispatch_s > 0
        assert window.data_wait_s >= 0
        assert window.peak_memory_bytes > 50 * 2**20

    # Means over ranks beside rank 0's clock: on a machine that others share, ranks leave one
    # window apart by what a process waits for a core, and meet again in the next.
    inside_s = sum(window.data_wait_s + window.dispatch_s for window in windows)
    assert inside_s < 1.2 * sum(window.wall_s for window in windows) + 0.5

    evals = of_kind(run_dir, records.EvalRecord)
    assert [(e.epoch, e.num_samples) for e in evals] == [(0, 12), (1, 12)]
    assert all(0 <= e.top1 <= e.top5 == 1 for e in evals)  # three classes

    end = end_of(run_dir)
    assert (end.status, end.num_steps, end.num_samples) == ("ok", 12, 96)
    assert (end.num_compiles, end.num_recompiles, end.skipped_steps) == (0, 0, 0)
    assert end.time_to_first_step_s > 0

    # What a person sees: rank 0's lines once, every rank in its file.
    assert result.stdout.count("step 2/12") == 1
    assert "loss" in result.stdout
    assert "samples/s" in result.stdout
    for rank in (0, 1):
        assert "step 2/12" in (run_dir / "logs" / f"rank{rank}.log").read_text()


def test_model_learns_the_mock_classes(images, tmp_path):
    flags = (*TINY, "--batch_size=16", "--max_steps=60", "--epochs=20", "--lr=0.01")
    result = run(*flags, f"--data=mock:{images}", f"--output_dir={tmp_path}", "--eval_interval=20")
    assert result.returncode == 0, result.stderr
    (scores,) = of_kind(tmp_path, records.EvalRecord)
    assert scores.top1 >= 0.75  # chance is a third


def test_torchrun_starts_the_same_worker(tmp_path):
    run_dir = tmp_path / "run"
    torchrun = ("-m", "tests.all_forked", "-m", "torch.distributed.run", "--standalone")
    result = python(
        *torchrun, "--nproc_per_node=2", "main.py", *TINY, "--data=synthetic",
        f"--output_dir={run_dir}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert of_kind(run_dir, records.RunRecord)[0].world_size == 2
    assert end_of(run_dir).num_samples == 6 * 4 * 2
    assert (run_dir / "logs" / "rank1.log").exists()


def test_gloos_threads_end_before_their_process(tmp_path):
    """Or they abort it now and then, for they need Python's lock to free what they hold."""
    flags = (*TINY, "--model=tests.nets:counts_threads", "--data=synthetic", "--nproc_per_node=2")
    result = run(*flags, f"--output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    told = re.findall(r"threads: (\d+) then (\d+)", result.stdout)
    assert len(told) == 2
    num_gloo = 3  # one that listens, two that run collectives
    for during, at_the_end in told:
        assert int(at_the_end) <= int(during) - num_gloo


def test_data_is_loaded_by_processes_that_start_before_the_model_is_built(images, tmp_path):
    """What they import takes seconds, as does what compilers import; others then evaluate."""
    result = run(
        *TINY, "--model=tests.nets:counts_loading_processes", f"--data=mock:{images}",
        "--workers=1", "--max_steps=12", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "loading processes: 1" in result.stdout
    assert end_of(tmp_path).num_steps == 12
    (scores,) = of_kind(tmp_path, records.EvalRecord)
    assert (scores.epoch, scores.num_samples) == (0, 12)


@pytest.fixture(scope="module")
def accbench_run(tmp_path_factory):
    """The folder of a run by `accbench run`."""
    folder = tmp_path_factory.mktemp("accbench_run")
    result = run(
        "-m", "accbench", "run", *TINY, "--data=synthetic", "--output_dir", folder, script="-B"
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_accbench_run_is_the_same_command(accbench_run):
    assert end_of(accbench_run).status == "ok"


def test_runs_repeat_exactly(tmp_path, images):
    for name in "ab":
        flags = (*TINY, f"--data=mock:{images}", f"--output_dir={tmp_path / name}")
        assert run(*flags, script="main.py").returncode == 0
    losses = [[w.loss for w in of_kind(tmp_path / name, records.WindowRecord)] for name in "ab"]
    assert losses[0] == losses[1]


def test_progress_bar_where_there_is_a_terminal(tmp_path):
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:slow", f"--output_dir={tmp_path}")
    ours, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        command(*flags), cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that its last process is gone
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(timeout=HANG_S) == 0
    text = shown.decode()
    assert "━" in text
    assert "6/6 steps" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "samples/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "━" not in (tmp_path / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("format", ["table", "md", "json"])
def test_report_shows_runs_and_says_which_it_cannot(tmp_path, accbench_run, format):
    run_dir = accbench_run
    (tmp_path / "empty").mkdir()
    result = run(
        "-m", "accbench", "report", run_dir, tmp_path / "empty", f"--format={format}", script="-B"
    )
    assert result.returncode == 2
    assert "empty" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    if format == "json":
        (row,) = json.loads(result.stdout)
        steady = [w for w in of_kind(run_dir, records.WindowRecord) if not w.warmup]
        speed = sum(w.num_samples for w in steady) / sum(w.wall_s for w in steady)
        assert row["samples_per_s"] == pytest.approx(speed)
    else:
        assert "samples/s" in result.stdout
        assert "1.00x" in result.stdout


def test_a_windows_mean_loss_is_that_of_its_steps(tmp_path):
    """A run with a window for each step tells the losses of each."""
    losses = {}
    for size in (1, 3):
        flags = (*TINY, "--data=synthetic", f"--warmup_steps={size}", f"--log_interval={size}")
        result = run(*flags, f"--output_dir={tmp_path / str(size)}", "--nproc_per_node=2")
        assert result.returncode == 0, result.stderr
        losses[size] = of_kind(tmp_path / str(size), records.WindowRecord)
    steps = [window.loss for window in losses[1]]
    assert [window.mean_loss for window in losses[1]] == pytest.approx(steps)
    assert [window.loss for window in losses[3]] == pytest.approx([steps[2], steps[5]])
    means = [sum(steps[:3]) / 3, sum(steps[3:]) / 3]
    assert [window.mean_loss for window in losses[3]] == pytest.approx(means)
    assert len(set(steps)) == 6


def test_a_rank_without_a_validation_sample_waits_for_the_others(tmp_path):
    plan = mock_images.MockImagePlan(num_classes=1, num_train=8, num_val=1)
    mock_images.make(tmp_path / "images", plan)
    flags = (*TINY, "--nproc_per_node=2", "--epochs=2", "--timeout_s=60")
    data = f"--data=imagefolder:{tmp_path / 'images'}"
    result = run(*flags, data, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    evals = of_kind(tmp_path / "run", records.EvalRecord)
    assert [(e.epoch, e.num_samples) for e in evals] == [(0, 1), (1, 1)]


def test_a_model_without_accuracy_is_evaluated_by_its_loss(images, tmp_path):
    """The checkpoint of the lowest loss stays; the losses fall, so that it is the last epoch's."""
    flags = (*TINY, "--model=tests.nets:Recolours", f"--data=imagefolder:{images}", "--epochs=2",
             "--max_steps=26", "--keep_checkpoints=1")  # fmt: skip
    result = run(*flags, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    scores = of_kind(tmp_path / "run", records.EvalRecord)
    assert [(s.top1, s.top5, s.num_samples) for s in scores] == [(None, None, 12)] * 2
    assert scores[0].loss > scores[1].loss > 0
    assert f"loss {scores[1].loss:.4f}  top-1 -  top-5 -" in result.stdout
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    facts = json.loads((kept / "checkpoint.json").read_text())
    assert facts["step"] == 24
    assert facts["loss"] == pytest.approx(scores[1].loss)
    assert facts["top1"] is None
