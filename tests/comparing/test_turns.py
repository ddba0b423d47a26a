"""Runs that train their windows in turn."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from accbench.comparing import rounds, turns
from accbench.comparing.plan import parse
from accbench.comparing.run import StopRequest
from accbench.recording import records
from accbench.report import analysis, comparison, publish
from accbench.system.turns import SOCKET_VARIABLE
from tests.conftest import HANG_S, ROOT, TINY, of_kind, start_python
from tests.report import fakes

WORKER = """
import os, sys, time
from accbench.system.turns import SOCKET_VARIABLE, Turns

name, windows, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
own = Turns(os.environ.get(SOCKET_VARIABLE))
for number in range(windows):
    with open(log, "a") as file:
        file.write(f"{name} {number} {time.monotonic()} ")
        time.sleep(0.02)
        file.write(f"{time.monotonic()}\\n")
    if os.environ.get("DIES_AFTER") == str(number):
        os.kill(os.getpid(), 9)
    was_shared = own.wait(number == windows - 1)
    with open(log + ".shared", "a") as file:
        file.write(f"{was_shared}\\n")
open(f"{log}.{name}", "w").close()
deadline = time.monotonic() + 60
while not all(os.path.exists(f"{log}.{other}") for other in os.environ.get("ENDS_WITH", "")):
    time.sleep(0.01)
    if time.monotonic() > deadline:
        with open(log, "a") as file:
            file.write(f"{name}-waits-in-vain -1 {deadline} {deadline}\\n")
        break
"""


class Run:
    """A process with a run's handle, of one worker that writes when it had its turns."""

    def __init__(self, name: str, windows: int, log: Path, giver: turns.TurnGiver, **env: str):
        self.command = [sys.executable, "-c", WORKER, name, str(windows), str(log)]
        self.env = {**os.environ, SOCKET_VARIABLE: str(giver.path), **env}

    def start(self, stop: StopRequest) -> None:
        self.process = subprocess.Popen(self.command, env=self.env, cwd=ROOT)
        self.pid = self.process.pid
        self.sentinel = os.pidfd_open(self.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.sentinel)


def in_turn(log: Path, windows: dict[str, int], **env: dict[str, str]) -> list[tuple[str, int]]:
    """Let runs take turns to their ends; returns (name, window) in order, none at once."""
    givers = [turns.TurnGiver(1) for _ in windows]
    made = [
        Run(name, number, log, giver, **env.get(name, {}))
        for (name, number), giver in zip(windows.items(), givers, strict=True)
    ]
    try:
        turns.take_turns(made, givers, StopRequest())
    finally:
        for run, giver in zip(made, givers, strict=True):
            run.close()
            giver.close()
            assert not giver.path.parent.exists()
    found = []
    ended_s = 0.0
    for line in log.read_text().splitlines():
        name, number, begins_s, ends_s = line.split()
        assert float(begins_s) >= ended_s
        ended_s = float(ends_s)
        found.append((name, int(number)))
    return found


def test_one_window_at_a_time_forwards_and_backwards(tmp_path):
    order = in_turn(tmp_path / "log", {"a": 3, "b": 3, "c": 2})
    assert [name for name, _ in order] == [*"abc", *"abc", *"ba"]
    assert [number for name, number in order if name == "a"] == [0, 1, 2]
    assert (tmp_path / "log.shared").read_text().split() == ["True"] * 8


def test_runs_end_at_once_behind_the_last_of_all_windows(tmp_path):
    """Each waits here for the ends of all."""
    ends = {name: {"ENDS_WITH": "abc"} for name in "abc"}
    order = in_turn(tmp_path / "log", {"a": 2, "b": 1, "c": 3}, **ends)
    assert [name for name, _ in order] == [*"abc", *"ac", "c"]


def test_a_run_that_dies_keeps_no_other_waiting(tmp_path):
    order = in_turn(tmp_path / "log", {"a": 3, "b": 3}, a={"DIES_AFTER": "1"})
    assert [each for each in order if each[0] == "b"] == [("b", 0), ("b", 1), ("b", 2)]
    assert ("a", 2) not in order


def test_runs_that_memory_would_not_hold_at_once_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "available_bytes", lambda: 1000)
    order = in_turn(tmp_path / "log", {"a": 2, "b": 2})
    assert order == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (tmp_path / "log.shared").read_text().split() == ["False"] * 4


def test_a_worker_without_a_comparison_goes_on(tmp_path):
    """One whose comparison is gone, and one that never had any."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        env = {**os.environ, SOCKET_VARIABLE: str(tmp_path / "s")}
        command = [sys.executable, "-c", WORKER, "a", "3", str(tmp_path / "log")]
        process = subprocess.Popen(command, env=env)
        listener.accept()[0].close()
    assert process.wait(timeout=HANG_S) == 0
    for path in ("", str(tmp_path / "s"), str(tmp_path / "none")):
        env[SOCKET_VARIABLE] = path
        assert subprocess.run(command, env=env, timeout=HANG_S).returncode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 12


class ForkedRun:
    """A worker that trains, forked, with the part of a run's handle that a giver looks at."""

    def __init__(self, giver: turns.TurnGiver, *flags: str):
        self.process = start_python("main.py", *flags, **{SOCKET_VARIABLE: str(giver.path)})
        self.sentinel, self._ends = os.pipe()  # of which the end is read once it has ended
        self._waiter = threading.Thread(target=self._wait)
        self._waiter.start()

    def _wait(self) -> None:
        try:
            self.process.wait(HANG_S)
        finally:
            os.close(self._ends)

    def close(self) -> int | None:
        """Wait for its end; its status."""
        self._waiter.join()
        self.process.end()
        os.close(self.sentinel)
        return self.process.returncode


def test_windows_leave_out_what_others_do_between_them(tmp_path):
    giver, wait_s = turns.TurnGiver(1), 0.4
    flags = (*TINY, "--data=synthetic", "--max_steps=8", "--warmup_steps=2", "--log_interval=2")
    folder = tmp_path / "run"
    trained = ForkedRun(giver, *flags, f"--output_dir={folder}")
    num_turns = 0
    try:
        while giver.wait(trained):
            num_turns += 1
            time.sleep(wait_s)
            giver.give(is_alone=False)
    finally:
        giver.close()  # without which nothing waits any more
        status = trained.close()
    assert status == 0
    assert num_turns == 4
    end = of_kind(folder, records.EndRecord)[0]
    assert wait_s * num_turns <= end.waited_s < wait_s * num_turns + 2
    windows = of_kind(folder, records.WindowRecord)
    assert len(windows) == 4
    # Two steps of the tiny net take milliseconds.
    assert max(window.wall_s for window in windows[1:]) < wait_s


def test_rows_of_a_comparison_alternate_on_a_cpu_alone():
    def alternates(*flags: str) -> bool:
        argv = ["--engines=ddp,ddp", "--device=cpu", "--data=synthetic", *flags]
        return parse(argv, "accbench compare").plan.alternates_windows

    assert alternates()
    assert alternates("--quick", "--nproc_per_node=2")
    assert not alternates("--no-alternate_windows")
    assert not alternates("--workers=1")


def windows_of(speeds: list[float]) -> list[records.WindowRecord]:
    return [
        fakes.window(10 * number, speed, warmup=number == 0)
        for number, speed in enumerate([50.0, *speeds])
    ]


def test_a_round_s_ratio_is_that_of_windows_next_to_each_other(tmp_path):
    """The machine slows down to a quarter within a round; a pair that is off moves nothing."""
    plan = fakes.plan(takes_medians=True, alternates_windows=True, repeats=3)
    speeds = [100.0, 90.0, 80.0, 60.0, 50.0, 40.0, 30.0, 25.0]
    folder = fakes.write(tmp_path, plan)
    for number in range(1, plan.repeats + 1):
        for row, factor in zip(plan.rows, (1.0, 1.2), strict=False):
            own = [speed * factor for speed in speeds]
            own[3] *= 0.2 if factor > 1 else 1
            header, *others = fakes.run(row.name, number)
            others = [one for one in others if not isinstance(one, records.WindowRecord)]
            at = comparison.round_folder(folder, number, row)
            fakes.write_run(at, [header, *windows_of(own), *others])
    read = comparison.read(folder, allow_mixed=True)
    base, other = read.rows[:2]
    assert comparison.round_ratios(plan, other, base) == [pytest.approx(1.2)] * 3
    page = publish.render([read], "md")
    assert "trained their windows in turn" in page
    assert "runs had no other in between: memory was short" in page  # as none has waited


def test_other_rows_are_not_others(tmp_path):
    """The launcher of a run that waited saw them; its windows did not."""
    plan = fakes.plan()
    folder = fakes.write(tmp_path, plan)
    row = plan.rows[0]
    at = comparison.round_folder(folder, 1, row)
    made = [
        dataclasses.replace(record, other_cpu_share=0.5)
        if isinstance(record, records.DeviceRecord)
        else dataclasses.replace(record, waited_s=5.0)
        if isinstance(record, records.EndRecord)
        else dataclasses.replace(record, other_cpu_share=0.03)
        if isinstance(record, records.WindowRecord)
        else record
        for record in fakes.run(row.name, 1)
    ]
    fakes.write_run(at, made)
    run = comparison.read(folder).rows[0].rounds[0]
    assert run.other_cpu_share == pytest.approx(0.03)
    wall_s = run.device.wall_s
    assert run.duration_s == wall_s - 5.0


def test_a_disturbed_round_of_runs_in_turn_is_repeated_as_a_whole(tmp_path, monkeypatch):
    argv = [*TINY, "--data=synthetic", "--device=cpu", "--engines=ddp,ddp", "--numerics_steps=0",
            "--repeats=2"]  # fmt: skip
    plan = parse(argv, "accbench compare").plan
    assert plan.alternates_windows
    shares = [0.4]
    measured = []

    def in_turns(together, caches):
        share = shares.pop() if shares else 0.0
        measured.append([(job.number, job.row.name) for job in together])
        for job in together:
            of_row = share if job.row.name == "ddp" else 0.0
            found = [
                dataclasses.replace(record, other_cpu_share=of_row)
                if isinstance(record, records.WindowRecord)
                else record
                for record in fakes.run("ddp", job.number)
            ]
            fakes.write_run(job.folder, found)
            (job.folder.parent / f"{job.folder.name}.log").write_text("")
        return [comparison.runs.read(job.folder) for job in together]

    monkeypatch.setattr(rounds, "run_in_turns", in_turns)
    with rounds.claim(plan, str(tmp_path / "c")) as folder:
        rounds.measure(plan, folder, Console(quiet=True))
    numbers = [[number for number, _ in together] for together in measured]
    assert numbers == [[1, 1], [1, 1], [2, 2]]
    first, _ = analysis.judge(comparison.read(tmp_path / "c", allow_mixed=True)).rows
    assert [what.number for what in first.repeated_rounds] == [1]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text())["alternates_windows"]
