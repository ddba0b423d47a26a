"""A fault in one worker ends the others, is told once, and leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from accbench.recording import records
from accbench.training import checkpoint_file, checkpoints
from tests import conftest
from tests.conftest import (
    HANG_S,
    ROOT,
    TINY,
    command,
    end_of,
    free_port,
    of_kind,
    processes_of,
    python,
    run,
    small_disk,
    start_python,
)  # fmt: skip
from tests.signals import left_of, under_way

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
    # torch 2.8 warns now and then, before the launcher tells of the failure.
    told = [line for line in result.stderr.splitlines() if "PyInterpreter.cpp" not in line]
    assert told[0].startswith("rank 1: Traceback")
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


def test_worker_that_hangs(tmp_path):
    """One sleeps, in another run one is stopped; the others of both wait at the same time."""
    timeout_s = 20  # the ranks may be seconds apart when they start
    with contextlib.ExitStack() as stack:
        started, workers = {}, []
        for model in ("sleeps_on_rank1", "stopped_on_rank1"):
            run_dir = tmp_path / model
            flags = (*SYNTHETIC, f"--model=tests.nets:{model}", f"--timeout_s={timeout_s}")
            arguments = command(*flags, f"--output_dir={run_dir}")
            started[run_dir] = stack.enter_context(under_way(run_dir, arguments, 1))
            workers += started[run_dir].below()
        assert len(workers) == 2 * 2
        for run_dir, process in started.items():
            _, stderr = process.communicate(timeout=HANG_S)
            ended = time.time()
            assert process.returncode == 1
            # The other rank is the one that could tell.
            assert "rank 0 failed" in stderr
            assert "imed out" in stderr
            assert end_of(run_dir).status == "error"
            hung = (run_dir / "records.jsonl").stat().st_mtime
            assert ended - hung < HANG_S  # far from the hour for which it would sleep
            first_window = of_kind(run_dir, records.WindowRecord)[0]
            assert first_window.num_steps == 2
            assert not processes_of(run_dir)
        assert not left_of(workers, timeout_s=0)


def listening_at(pid: int) -> set[str]:
    """Addresses at which a process and those below it listen."""
    launcher = psutil.Process(pid)
    return {
        connection.laddr.ip
        for process in (launcher, *launcher.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.usefixtures("hangups_come")
@pytest.mark.parametrize(("number", "start"), [
    (signal.SIGINT, under_way),
    # These start as anyone's do, with all their imports.
    pytest.param(signal.SIGTERM, conftest.under_way, marks=pytest.mark.soak),
    pytest.param(signal.SIGHUP, conftest.under_way, marks=pytest.mark.soak),
])  # fmt: skip
def test_interruption_where_nothing_is_saved(tmp_path, number, start):
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, *ENDLESS, f"--output_dir={run_dir}", "--save_interval=0")
    with start(run_dir, command(*flags), 2) as process:
        assert listening_at(process.pid) == {"127.0.0.1"}  # nobody was asked for more
        workers = psutil.Process(process.pid).children(recursive=True)
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
    assert len(workers) == 2
    assert not left_of(workers, timeout_s=0)


def test_workers_die_with_a_killed_launcher(images, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, *ENDLESS, "--eval_interval=0", f"--output_dir={run_dir}")
    loading = ("--workers=1", f"--data=mock:{images}")
    with under_way(run_dir, command(*flags, *loading), 2) as process:
        below = process.below()
        assert sum("spawn_main" in " ".join(one.cmdline()) for one in below) == 1  # it loads
    assert not left_of(below)
    # Nobody was left to write how it ended; what was done stands there all the same.
    assert of_kind(run_dir, records.WindowRecord)
    assert not of_kind(run_dir, records.EndRecord)


def test_workers_die_with_a_killed_agent(tmp_path):
    run_dir = tmp_path / "run"
    torchrun = ("-m", "tests.all_forked", "-m", "torch.distributed.run", "--standalone")
    flags = (*SYNTHETIC, *ENDLESS, f"--output_dir={run_dir}")
    arguments = [sys.executable, *torchrun, "--nproc_per_node=2", "main.py", *flags]
    with under_way(run_dir, arguments, 2, OMP_NUM_THREADS="1") as process:
        workers = process.below()
        assert len(workers) == 2
    assert not left_of(workers)


def test_worker_whose_launcher_was_killed_before_it_began(tmp_path):
    file = tmp_path / "error.json"
    file.touch()
    environment = {"ACCBENCH_ERROR_FILE": str(file), "ACCBENCH_LAUNCHER_PID": str(2**22 + 1)}
    result = python("main.py", *TINY, "--data=synthetic", f"--output_dir={tmp_path}", **environment)
    assert result.returncode == -signal.SIGKILL


def test_rank_that_never_joins_and_a_port_in_use(tmp_path):
    flags = (*TINY, "--data=synthetic", "--timeout_s=5")
    first = free_port()
    second = next(port for port in iter(free_port, None) if port != first)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = taken.getsockname()[1]
        cases = (
            (0, first, "1/2 clients joined"),
            (1, second, "rank 1 of 2 did not meet the others"),
            (0, in_use, "address already in use"),
        )
        started = []  # all of them, which wait at the same time
        for number, (rank, port, _) in enumerate(cases):
            place = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            }  # fmt: skip
            output = f"--output_dir={tmp_path / str(number)}"
            started.append(start_python("main.py", *flags, output, **place))
        for (_, port, cause), process in zip(cases, started, strict=True):
            try:
                status = process.wait(HANG_S)
            finally:
                _, stderr = process.end()
            assert status == 2
            *_of_torch, line = stderr.strip().splitlines()
            assert "Traceback" not in stderr
            assert line.startswith("main.py: rank ")
            assert cause in line
            assert f"127.0.0.1:{port}" in line
            assert "MASTER_PORT that is free" in line


def test_loss_that_is_not_a_number(tmp_path):
    result, run_dir = run_fault(tmp_path, "not_a_number")
    assert result.returncode == 1
    assert "the loss is not finite at step 1" in result.stderr
    end = end_of(run_dir)
    assert end.status == "nan"
    assert of_kind(run_dir, records.WindowRecord)[0].loss is None


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_disk_that_checkpoints_fill(images, tmp_path, policy):
    flags = (*TINY, f"--data=imagefolder:{images}", "--epochs=9", "--max_steps=30",
             "--save_steps=1", "--keep_checkpoints=99", f"--on_save_error={policy}")  # fmt: skip
    with small_disk(tmp_path / "disk", "600k"):
        run_dir = tmp_path / "disk" / "run"
        result = run(*flags, f"--output_dir={run_dir}")
        assert "Traceback" not in result.stderr
        whole = checkpoints.steps_of(run_dir)
        assert 3 < len(whole) < 30
        for step in whole:
            checkpoint_file.verify(checkpoints.folder_of(run_dir, step))
        if policy == "stop":
            assert result.returncode == 2
            assert "cannot write a checkpoint" in result.stderr.splitlines()[0]
            assert "No space left on device" in result.stderr
            assert end_of(run_dir).status == "error"
        else:
            assert result.returncode == 0, result.stderr
            assert "training goes on" in result.stdout
            assert end_of(run_dir).num_steps == 30
        for step in whole[:-1]:  # room again
            shutil.rmtree(checkpoints.folder_of(run_dir, step))
        result = run(*flags, f"--output_dir={run_dir}", "--resume=auto", "--keep_checkpoints=1")
        assert result.returncode == 0, result.stderr
        assert f"going on from {checkpoints.folder_of(run_dir, whole[-1])}" in result.stdout
        assert end_of(run_dir).num_steps == 30


def test_disk_that_is_read_only(tmp_path):
    with small_disk(tmp_path / "disk", "100k"):
        os.system(f"mount -o remount,ro {tmp_path / 'disk'}")
        result = run(*TINY, "--data=synthetic", f"--output_dir={tmp_path / 'disk' / 'run'}")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "cannot write to --output_dir" in line
    assert "Read-only file system" in line


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_clock_that_steps(images, tmp_path, monkeypatch):
    library = tmp_path / "clock_steps.so"
    source = ROOT / "tests" / "scripts" / "clock_steps.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SLOW_NET_S", "0.1")
    script = "import time; seen = [(time.sleep(0.01), time.time())[1] for _ in range(100)]\n"
    script += "print(max(seen) - min(seen))"
    stepped = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert float(stepped.stdout) > 3000  # it does
    flags = (*TINY, "--model=tests.nets:slow", "--log_interval=1",
             f"--data=imagefolder:{images}", "--epochs=2", "--save_steps=2",
             f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    began = time.monotonic()
    # Two workers by a launcher; then one alone goes on, for each starts anew with the library.
    for script, more in (
        ("launch_single_task.py", ("--max_steps=5", "--nproc_per_node=2")),
        ("main.py", ("--max_steps=10", "--resume=auto")),
    ):
        result = run(*flags, *more, script=script)
        assert result.returncode == 0, result.stderr
        assert not result.stderr
    passed_s = time.monotonic() - began
    windows = of_kind(tmp_path / "run", records.WindowRecord)
    assert sum(window.num_steps for window in windows) == 10
    assert all(0 < window.wall_s < passed_s for window in windows)
    assert all(0 <= window.data_wait_s <= window.wall_s for window in windows)
    for saved in of_kind(tmp_path / "run", records.CheckpointRecord):
        assert 0 <= saved.stall_s < passed_s
        assert 0 <= saved.write_s < passed_s


def test_fault_under_plain_python(tmp_path):
    flags = (*TINY, "--data=synthetic", "--model=tests.nets:not_a_number")
    result = run(*flags, f"--output_dir={tmp_path / 'run'}", script="main.py")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert end_of(tmp_path / "run").status == "nan"
