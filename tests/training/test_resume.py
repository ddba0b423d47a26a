"""Runs that are stopped or killed, and go on: the same losses, bit for bit."""

import functools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from accbench.data import mock_images
from accbench.recording import records
from accbench.training import checkpoints
from tests import conftest
from tests.conftest import (
    HANG_S,
    NOT_OPTIMISED,
    TINY,
    command,
    end_of,
    of_kind,
    processes_of,
    python,
    run,
)  # fmt: skip
from tests.engine_params import HAS_XLA, NEEDS_XLA
from tests.signals import left_of, under_way

# Without LLVM's optimisation a resumed run's evaluation differs in the last digits.
pytestmark = pytest.mark.usefixtures("as_users_have_it")

# 3 classes of 16 images, augmented; 2 workers of batch 4 make 6 steps an epoch, one of them 12.
STEPS = 16
LEARNING = (
    *TINY, "--model=tests.nets:killed_once", f"--max_steps={STEPS}", "--warmup_steps=1",
    "--log_interval=1", "--epochs=9", "--save_steps=5", "--lr=0.01", "--lr_schedule=step",
    "--lr_step_epochs=0.7", "--lr_step_factor=0.5", "--lr_warmup_epochs=0.4",
    "--accumulate=2", "--clip_norm=1", "--decay=matrices", "--ema_decay=0.9", "--mixup=0.2",
    "--cutmix=1", "--label_smoothing=0.1",
)  # fmt: skip


def losses(run_dir) -> list[float]:
    """By step; fails where a step is missing or counted twice."""
    windows = of_kind(run_dir, records.WindowRecord)
    assert [window.first_step for window in windows] == list(range(len(windows)))
    return [window.loss for window in windows]


def evaluations(run_dir) -> list[records.EvalRecord]:
    return of_kind(run_dir, records.EvalRecord)


SETTINGS = {
    "ddp-2": ("--engine=ddp", "--nproc_per_node=2"),
    "xla-1": ("--engine=xla", "--nproc_per_node=1", "--optimizer=sgd", "--nesterov"),
    "xla-2": ("--engine=xla", "--nproc_per_node=2"),
}


class Undisturbed:
    """Runs that nobody stopped: `undisturbed / SETTING` is the folder of one."""

    def __init__(self, folder: Path, images: Path) -> None:
        self.folder, self.images = folder, images

    def __truediv__(self, setting: str) -> Path:
        run_dir = self.folder / setting
        if not run_dir.exists():
            data = f"--data=imagefolder:{self.images}"
            result = run(*LEARNING, *SETTINGS[setting], data, f"--output_dir={run_dir}")
            assert result.returncode == 0, result.stderr
        return run_dir


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), images)


@pytest.mark.parametrize("name", [
    "ddp-2",
    pytest.param("xla-1", marks=[pytest.mark.xla, NEEDS_XLA, pytest.mark.soak]),
    pytest.param("xla-2", marks=[pytest.mark.xla, NEEDS_XLA]),
])  # fmt: skip
def test_killed_and_started_again(images, undisturbed, tmp_path, monkeypatch, name):
    order = tmp_path / "killed_once"
    # Twice a step: in the middle of an epoch, and perhaps of saving step 10.
    order.write_text("21")
    monkeypatch.setenv("KILLED_ONCE", str(order))
    run_dir = tmp_path / "run"
    # Loading in the same process and in others makes no difference.
    result = run(*LEARNING, *SETTINGS[name], f"--data=imagefolder:{images}",
                 f"--output_dir={run_dir}", "--max_restarts=1",
                 f"--workers={int(name == 'xla-1')}", "--xla.replay=off")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not order.exists()
    assert "was killed by SIGKILL" in result.stderr
    assert "going on from" in result.stdout
    assert "starting again, 1 of 1" in result.stdout
    assert losses(run_dir) == losses(undisturbed / name)
    assert evaluations(run_dir) == evaluations(undisturbed / name)
    assert {e.averaged for e in evaluations(run_dir)} == {False, True}
    (resumed,) = of_kind(run_dir, records.ResumeRecord)
    assert resumed.step in (5, 6, 10)
    assert end_of(run_dir).num_steps == STEPS
    assert end_of(run_dir).skipped_steps == 0
    assert not processes_of(run_dir)


def test_restarts_come_to_an_end(tmp_path):
    result = run(*TINY, "--data=synthetic", "--model=tests.nets:raises_on_rank1",
                 "--max_restarts=1", "--nproc_per_node=2",
                 f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.count("ValueError: planted fault; logs in") == 2
    assert result.stdout.count("no checkpoint in") == 1
    end = end_of(tmp_path / "run")
    assert end.status == "error"
    assert end.num_steps == 2  # not those of the tries before


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak),
])  # fmt: skip
def test_asked_to_stop(images, undisturbed, tmp_path, monkeypatch, number):
    """The first signal ends the step and saves; the run then goes on as if nothing had been."""
    monkeypatch.setenv("SLOW_NET_S", "0.3")
    run_dir = tmp_path / "run"
    flags = (*LEARNING, "--data=imagefolder:" + str(images), *SETTINGS["ddp-2"],
             f"--output_dir={run_dir}", "--save_steps=1000")  # fmt: skip
    with under_way(run_dir, command(*flags, "--model=tests.nets:slow_killed_once"), 3) as process:
        workers = process.below()
        assert len(workers) == 2
        # As systemd does: to the launcher and its workers, and `timeout` to the launcher again.
        for pid in (process.pid, *(worker.pid for worker in workers), process.pid):
            os.kill(pid, number)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, stderr
    assert "Traceback" not in stderr
    assert "all is saved, go on with --resume auto" in stderr
    end = end_of(run_dir)
    assert end.status == "interrupted"
    (saved,) = of_kind(run_dir, records.CheckpointRecord)
    assert saved.step == end.num_steps == len(losses(run_dir)) < STEPS
    assert not processes_of(run_dir)
    assert not left_of(workers, timeout_s=0)
    monkeypatch.setenv("SLOW_NET_S", "0")
    result = run(*flags, "--model=tests.nets:slow_killed_once", "--resume=auto")
    assert result.returncode == 0, result.stderr
    assert losses(run_dir) == losses(undisturbed / "ddp-2")


def test_asked_to_stop_while_it_evaluates(images, tmp_path, monkeypatch):
    """The epoch is saved at once, and its evaluation is made by the run that goes on."""
    monkeypatch.setenv("SLOW_NET_S", "0.3")
    run_dir = tmp_path / "run"
    flags = (*TINY, "--model=tests.nets:slow", "--max_steps=99", "--epochs=2", "--batch_size=3",
             f"--data=imagefolder:{images}", f"--output_dir={run_dir}")  # fmt: skip
    with under_way(run_dir, command(*flags), 8) as process:  # of two steps: all of the epoch
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, stderr
    assert "stopped after step 16" in stderr
    assert not evaluations(run_dir)
    (saved,) = of_kind(run_dir, records.CheckpointRecord)
    assert (saved.step, saved.epoch) == (16, 1)
    monkeypatch.setenv("SLOW_NET_S", "0")
    # The last epoch is saved with its scores, though its number is none of --save_interval's.
    result = run(*flags, "--resume=auto", "--save_interval=5")
    assert result.returncode == 0, result.stderr
    assert [(e.epoch, e.num_samples) for e in evaluations(run_dir)] == [(0, 12), (1, 12)]
    assert end_of(run_dir).num_steps == 32
    for step in (16, 32):
        saved = checkpoints.folder_of(run_dir, step) / "checkpoint.json"
        assert json.loads(saved.read_text())["loss"] is not None


def under_nohup(run_dir, arguments, num_windows):
    return conftest.under_way(run_dir, ["nohup", *arguments], num_windows)


@pytest.mark.parametrize("start", [
    pytest.param(functools.partial(under_way, ignores_hangups=True), id="forked"),
    pytest.param(under_nohup, id="nohup", marks=pytest.mark.soak),
])  # fmt: skip
def test_hangup_under_nohup_changes_nothing(images, undisturbed, tmp_path, start):
    run_dir = tmp_path / "run"
    flags = (*LEARNING, *SETTINGS["ddp-2"], f"--data=imagefolder:{images}",
             f"--output_dir={run_dir}")  # fmt: skip
    with start(run_dir, command(*flags), 2) as process:
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, stderr
    assert losses(run_dir) == losses(undisturbed / "ddp-2")


def test_ctrl_c_in_a_terminal_reaches_loading_processes_too(images, tmp_path, monkeypatch):
    """A terminal sends it to all of them; those that load go on until training has ended."""
    monkeypatch.setenv("SLOW_NET_S", "0.5")
    run_dir = tmp_path / "run"
    flags = (*LEARNING, "--model=tests.nets:slow", f"--data=imagefolder:{images}", "--workers=1",
             f"--output_dir={run_dir}")  # fmt: skip
    with under_way(run_dir, command(*flags, script="main.py"), 2) as process:
        loading = process.below()
        assert any("spawn_main" in " ".join(one.cmdline()) for one in loading)
        for _ in range(2):  # by several ways at once, it is one request
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, stderr
    assert "Traceback" not in stderr
    assert not processes_of(run_dir)
    assert not left_of(loading)


def test_after_a_hangup_ctrl_c_is_no_order(tmp_path, monkeypatch):
    """A notebook sends both some time after its own interrupt, and takes them for one."""
    monkeypatch.setenv("SLOW_NET_S", "3")
    run_dir = tmp_path / "run"
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:slow", "--warmup_steps=1",
             f"--output_dir={run_dir}")  # fmt: skip
    with under_way(run_dir, command(*flags), 1) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.2)  # or they would be the same request
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, stderr
    assert "all is saved" in stderr
    assert end_of(run_dir).status == "interrupted"


def test_second_signal_ends_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW_NET_S", "10")
    run_dir = tmp_path / "run"
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:slow", "--warmup_steps=1",
             f"--output_dir={run_dir}")  # fmt: skip
    with under_way(run_dir, command(*flags), 1) as process:
        time.sleep(1)  # its second step, of ten seconds, has begun on a busy machine too
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)  # it means to finish its step
        workers = process.below()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "stopped by SIGTERM" in stderr
    assert end_of(run_dir).status == "interrupted"
    assert not processes_of(run_dir)
    assert not left_of(workers, timeout_s=0)


def test_other_engine_other_number_of_workers(images, tmp_path, monkeypatch):
    """Saved under one, resumed under another: the same losses but for rounding."""
    # LLVM's optimisation would take most of the time, and the last digits are not looked at.
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {NOT_OPTIMISED}".strip())
    # Nor are evaluations, for which engines compile graphs of their own.
    model = ("--model=tests.nets:tiny", f"--data=imagefolder:{images}", "--eval_interval=0")
    first = tmp_path / "first"
    result = run(*LEARNING, *model, *SETTINGS["ddp-2"], f"--output_dir={first}",
                 "--keep_checkpoints=9")  # fmt: skip
    assert result.returncode == 0, result.stderr
    whole, at_10 = losses(first), checkpoints.folder_of(first, 10)
    for engine, num_workers in (("xla" if HAS_XLA else "jax", 2), ("inductor", 1)):
        run_dir = tmp_path / f"{engine}-{num_workers}"
        result = run(*LEARNING, *model, f"--engine={engine}", f"--nproc_per_node={num_workers}",
                     f"--output_dir={run_dir}", f"--resume={at_10}")  # fmt: skip
        assert result.returncode == 0, result.stderr
        windows = of_kind(run_dir, records.WindowRecord)
        assert windows[0].first_step == 10
        # As far into its schedule, of which a worker alone has twice as many steps.
        assert windows[0].lr == of_kind(first, records.WindowRecord)[10].lr
        if num_workers == 2:
            assert [w.loss for w in windows] == pytest.approx(whole[10:], rel=1e-3)
        else:  # half of each batch, of the same samples
            assert "saved by 2 workers, now 1" in result.stdout
            assert windows[0].loss == pytest.approx(whole[10], rel=0.5)
        (resumed,) = of_kind(run_dir, records.ResumeRecord)
        assert resumed.checkpoint == str(at_10)


def test_what_cannot_be_resumed(undisturbed, images, tmp_path):
    run_dir = undisturbed / "ddp-2"
    synthetic = (*TINY, "--data=synthetic", f"--output_dir={tmp_path / 'new'}")
    here = ("--resume=auto", f"--output_dir={run_dir}")
    more_images = tmp_path / "images"
    mock_images.make(more_images, mock_images.MockImagePlan(num_classes=3, num_train=17, num_val=1))
    written = [(run_dir / name).read_bytes() for name in ("config.json", "records.jsonl")]
    for flags, cause in {
        ("--resume=auto", *TINY, "--data=synthetic"): "looks for checkpoints in --output_dir",
        (*synthetic, "--save_interval=0", "--save_steps=5"): "--save_steps needs checkpoints",
        (*synthetic, "--save_interval=0", "--on_nan=rollback"): "--on_nan rollback needs",
        (*synthetic, f"--resume={tmp_path}"): "no checkpoint is in it",
        (*TINY, "--data=synthetic", *here): "is of --model tests.nets:killed_once",
        (*LEARNING, "--data=synthetic", "--synthetic.num_classes=5", *here):
            "it is of classes 3, and this is 5",
        (*LEARNING, "--data=synthetic", *here): "it is of --data imagefolder, and",
        (*LEARNING, f"--data=imagefolder:{images}", "--seed=3", *here): "it is of --seed 0, and",
        (*LEARNING, f"--data=imagefolder:{more_images}", f"--resume={run_dir}",
         f"--output_dir={tmp_path / 'other'}"): "it is of training samples 48, and this is 51",
        (*synthetic, f"--output_dir={run_dir}"): "or resume it with --resume auto",
    }.items():  # fmt: skip
        result = run(*flags)
        assert result.returncode == 2, (flags, result.stderr)
        assert cause in result.stderr
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    # A run that is refused leaves the one that is there as it was.
    assert [(run_dir / name).read_bytes() for name in ("config.json", "records.jsonl")] == written


@pytest.mark.xla
@NEEDS_XLA
def test_replayed_steps_go_on(images, undisturbed, tmp_path):
    """XLA's recorded steps, with dropout, stopped in the middle of an epoch."""
    flags = (*LEARNING, *SETTINGS["xla-1"], f"--data=imagefolder:{images}",
             f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    for more in (("--max_steps=14",), ("--resume=auto",)):
        done = run(*flags, *more)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(undisturbed / "xla-1")


def test_done_already(images, undisturbed, tmp_path):
    flags = (*LEARNING, *SETTINGS["ddp-2"], f"--data=imagefolder:{images}", "--max_steps=6",
             "--save_steps=3", f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    first = run(*flags)
    assert first.returncode == 0, first.stderr
    again = run(*flags, "--resume=auto")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run") == losses(undisturbed / "ddp-2")[:6]
    assert end_of(tmp_path / "run").num_steps == 6
    # From an earlier one on, those after it count no more, and are not lost.
    earlier = checkpoints.folder_of(tmp_path / "run", 3)
    other = run(*flags, f"--resume={earlier}", "--max_steps=5", "--keep_checkpoints=1")
    assert other.returncode == 0, other.stderr
    assert checkpoints.steps_of(tmp_path / "run") == [5]
    (aside,) = earlier.parent.glob("abandoned-*")
    assert f"the checkpoints after step 3 count no more; they are in {aside}" in other.stdout
    assert [path.name for path in aside.iterdir()] == ["step-000000006"]
    back = run(*flags, f"--resume={aside / 'step-000000006'}")
    assert "already holds a run" in back.stderr


def test_under_torchrun(images, undisturbed, tmp_path):
    """main.py itself finds the checkpoint."""
    run_dir = tmp_path / "run"
    flags = (*LEARNING, f"--data=imagefolder:{images}", f"--output_dir={run_dir}")
    begun = run(*flags, "--nproc_per_node=2", "--max_steps=8")
    assert begun.returncode == 0, begun.stderr
    done = python(
        "-m", "tests.all_forked", "-m", "torch.distributed.run", "--standalone",
        "--nproc_per_node=2", "main.py", *flags, "--resume=auto", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(run_dir) == losses(undisturbed / "ddp-2")
    assert json.loads((run_dir / "config.json").read_text())["resume"].endswith("step-000000008")
