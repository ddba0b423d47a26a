"""Passes of the numerics that run at once."""

import os
import subprocess
import sys

import pytest

from accbench.comparing import jobs, side_by_side
from accbench.comparing.plan import parse
from accbench.comparing.run import StopRequest
from tests.conftest import TINY


class Sleep:
    """A process that sleeps, with the handle of a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.pid = self.sentinel = None

    def start(self, stop: StopRequest) -> None:
        code = f"import time; time.sleep({self.seconds})"
        self.process = subprocess.Popen([sys.executable, "-c", code])
        self.pid = self.process.pid
        self.sentinel = os.pidfd_open(self.pid)


def most_at_once(needed_bytes: list[int | None], monkeypatch) -> tuple[int, list[int]]:
    """How many were alive at once, and the indices of those that ended, in order."""
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 1000)
    alive, most, order = 0, 0, []

    class Counted(Sleep):
        def start(self, stop: StopRequest) -> None:
            nonlocal alive, most
            super().start(stop)
            alive += 1
            most = max(most, alive)

    processes = [Counted(0.6 if index == 0 else 0.05) for index in range(len(needed_bytes))]

    def ended(index: int) -> None:
        nonlocal alive
        alive -= 1
        assert processes[index].process.wait(10) == 0
        order.append(index)

    try:
        side_by_side.run_all(processes, needed_bytes, StopRequest(), ended)
    finally:
        for one in processes:
            if one.sentinel is not None:
                one.process.kill()
                one.process.wait()
                os.close(one.sentinel)
    assert sorted(order) == [*range(len(needed_bytes))]
    return most, order


def test_two_run_at_once_and_the_next_begins_when_one_ends(monkeypatch):
    most, order = most_at_once([500] * 4, monkeypatch)
    assert most == 2
    assert order[0] != 0  # the first one takes longest


@pytest.mark.parametrize("needed_bytes", [2000, None])
def test_what_memory_might_not_hold_begins_alone(needed_bytes, monkeypatch):
    most, order = most_at_once([needed_bytes] * 3, monkeypatch)
    assert (most, order) == (1, [0, 1, 2])


def passes_of(tmp_path, *flags: str) -> list[list[str]]:
    plan = parse([*TINY, "--engines=ddp,inductor", *flags], "test").plan
    groups = jobs.in_order(plan, tmp_path)
    return [[job.label for job in group] for group in groups if group[0].number is None]


def test_passes_that_wait_for_each_other_come_one_by_one(tmp_path):
    flags = ("--data=synthetic", "--device=cpu", "--numerics_steps=2")
    reference, *passes = passes_of(tmp_path, *flags)
    assert reference == ["numerics  float64 reference"]
    together = ["plain ddp", "plain ddp, other layout", "inductor"]
    assert passes == [
        [f"numerics  {name}" for name in together], ["numerics  ddp, as plain ddp"],
    ]  # fmt: skip
    on_nodes = passes_of(tmp_path, *flags, "--nnodes=2", "--rdzv_endpoint=localhost:1")
    assert [len(group) for group in on_nodes] == [1] * 5
