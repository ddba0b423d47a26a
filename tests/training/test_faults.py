"""A fault in one worker ends the others, is told once, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from accbench.recording import records
from tests.conftest import (
    HANG_S,
    ROOT,
    TINY,
    command,
    end_of,
    of_kind,
    processes_of,
    run,
    small_disk,
    under_way,
)  # fmt: skip

# Trains for hours: only what the test does can end it before HANG_S.
ENDLESS = ("--model=tests.nets:slow", "--max_steps=1000000", "--epochs=1000000")

# Without image files a worker starts a few seconds sooner.
SYNTHETIC = (*TINY, "--data=synthetic", "--nproc_per_node=2")


def run_fault(tmp_path, model: str, *flags: str):
    """Run a net that goes wrong on rank 1; (result, run's folder)."""
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, f"--model=tests.nets:{model}", f"--output_dir={run_dir}", *flags)
    result = run(*flags)
    assert not processes_of(run_dir)
    return result, run_dir


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """A run in which rank 1 raised: (result, run's folder)."""
    return run_fault(tmp_path_factory.mktemp("raised"), "raises_on_rank1")


def test_first_failing_ranks_traceback_is_shown_once(raised):
    result, run_dir = raised
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert result.stderr.startswith("rank 1: Traceback")
    assert result.stderr.count("in _raise") == 1
    end = end_of(run_dir)
    assert end.status == "error"
    assert end.error == "rank 1 failed: ValueError: planted fault"
    assert "planted fault" in (run_dir / "logs" / "rank1.log").read_text()
    assert "planted fault" not in (run_dir / "logs" / "rank0.log").read_text()


def test_failure_comes_before_a_crash_while_ending(tmp_path):
    result, run_dir = run_fault(tmp_path, "raises_on_rank1_and_crashes")
    assert result.returncode == 1
    assert end_of(run_dir).error == "rank 1 failed: ValueError: planted fault"


def test_record_tells_what_was_done_before_the_fault(raised):
    _, run_dir = raised
    (window,) = of_kind(run_dir, records.WindowRecord)
    end = end_of(run_dir)
    assert window.num_steps == end.num_steps == 2
    assert window.num_samples == end.num_samples == 2 * 4 * 2


def test_killed_worker(tmp_path):
    result, run_dir = run_fault(tmp_path, "killed_on_rank1")
    assert result.returncode == 1
    assert "rank 1 was killed by SIGKILL" in result.stderr
    assert "Traceback" not in result.stderr
    assert end_of(run_dir).status == "error"
    assert "rank 1 was killed by SIGKILL" in end_of(run_dir).error


def test_disk_that_gets_full(tmp_path):
    with small_disk(tmp_path / "disk", "40k"):
        run_dir = tmp_path / "disk" / "run"
        result = run(*SYNTHETIC, "--log_interval=1", "--max_steps=400", f"--output_dir={run_dir}",
                     "--synthetic.steps_per_epoch=400")  # fmt: skip
        assert result.returncode == 2
        first, second = result.stderr.splitlines()
        full = f"cannot write {run_dir / 'records.jsonl'}: No space left on device"
        assert full in first
        assert full in second
        assert "the record lacks its end" in second
        windows = of_kind(run_dir, records.WindowRecord)
        assert sum(window.num_steps for window in windows) > 20  # what fitted can be read
        assert not processes_of(run_dir)


@pytest.mark.parametrize(
    ("size", "cannot"), [("100k", "disk/run/records.jsonl"), ("24k", "to {disk}/tmp/")]
)
def test_disk_that_gets_full_and_is_the_temporary_folders_too(tmp_path, monkeypatch, size, cannot):
    disk = tmp_path / "disk"
    with small_disk(disk, size):
        (disk / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(disk / "tmp"))
        result = run(*SYNTHETIC, "--log_interval=1", "--max_steps=900",
                     "--synthetic.steps_per_epoch=900", f"--output_dir={disk / 'run'}")  # fmt: skip
        assert result.returncode == 2
        lines = result.stderr.splitlines()
        assert all(line.startswith("accbench: ") for line in lines), result.stderr
        assert "accbench: cannot write" in lines[0]
        assert cannot.format(disk=disk) in lines[0]
        assert "No space left on device" in lines[0]


@pytest.mark.parametrize("model", ["sleeps_on_rank1", "stopped_on_rank1"])
def test_worker_that_hangs(tmp_path, model):
    timeout_s = 20  # the ranks may be seconds apart when they start
    result, run_dir = run_fault(tmp_path, model, f"--timeout_s={timeout_s}")
    ended = time.time()
    assert result.returncode == 1
    # The other rank is the one that could tell.
    assert "rank 0 failed" in result.stderr
    assert "imed out" in result.stderr
    assert end_of(run_dir).status == "error"
    hung = (run_dir / "records.jsonl").stat().st_mtime
    assert ended - hung < HANG_S  # far from the hour for which it would sleep
    first_window = of_kind(run_dir, records.WindowRecord)[0]
    assert first_window.num_steps == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_where_nothing_is_saved(tmp_path, number):
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, *ENDLESS, f"--output_dir={run_dir}", "--save_interval=0")
    with under_way(run_dir, command(*flags), 2) as process:
        sent = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=HANG_S)
    assert time.monotonic() - sent < 120  # a second or two where nothing else runs
    assert process.returncode == 130
    assert f"stopped by {number.name}" in stderr
    assert "Traceback" not in stderr
    end = end_of(run_dir)
    assert end.status == "interrupted"
    assert end.num_steps >= 2
    assert not (run_dir / "checkpoints").exists()
    assert not processes_of(run_dir)


def test_workers_die_with_a_killed_launcher(images, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, *ENDLESS, f"--output_dir={run_dir}")
    loading = ("--workers=1", f"--data=mock:{images}")
    with under_way(run_dir, command(*flags, *loading), 2):
        pass
    _, alive = psutil.wait_procs(processes_of(run_dir), timeout=HANG_S)
    assert not alive
    # Nobody was left to write how it ended; what was done stands there all the same.
    assert of_kind(run_dir, records.WindowRecord)
    assert not of_kind(run_dir, records.EndRecord)


def test_workers_die_with_a_killed_agent(tmp_path):
    run_dir = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "main.py")
    arguments = [sys.executable, *torchrun, *SYNTHETIC, *ENDLESS, f"--output_dir={run_dir}"]
    with under_way(run_dir, arguments, 2, env={**os.environ, "OMP_NUM_THREADS": "1"}):
        pass
    _, alive = psutil.wait_procs(processes_of(run_dir), timeout=HANG_S)
    assert not alive


def test_worker_whose_launcher_was_killed_before_it_began(tmp_path):
    file = tmp_path / "error.json"
    file.touch()
    environment = {"ACCBENCH_ERROR_FILE": str(file), "ACCBENCH_LAUNCHER_PID": str(2**22 + 1)}
    result = subprocess.run(
        [sys.executable, "main.py", *TINY, "--data=synthetic", f"--output_dir={tmp_path}"],
        cwd=ROOT, env={**os.environ, **environment}, timeout=600,
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL


def test_loss_that_is_not_a_number(tmp_path):
    result, run_dir = run_fault(tmp_path, "not_a_number")
    assert result.returncode == 1
    assert "the loss is not finite at step 1" in result.stderr
    end = end_of(run_dir)
    assert end.status == "nan"
    assert of_kind(run_dir, records.WindowRecord)[0].loss is None


def test_fault_under_plain_python(tmp_path):
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:not_a_number")
    result = run(*flags, f"--output_dir={tmp_path / 'run'}", script="main.py")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert end_of(tmp_path / "run").status == "nan"
