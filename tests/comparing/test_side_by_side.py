"""Passes of the numerics that run at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accbench.comparing import jobs, side_by_side
from accbench.comparing.plan import parse
from accbench.comparing.run import StopRequest
from tests.conftest import HANG_S, TINY

WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"


class Run:
    """A process with the handle of a run; it ends at once, or when a file is there."""

    def __init__(self, waits_for: Path | None) -> None:
        self.command = [sys.executable, "-c", WAITS if waits_for else "", str(waits_for)]
        self.pid = self.sentinel = None

    def start(self, stop: StopRequest) -> None:
        self.process = subprocess.Popen(self.command)
        self.pid = self.process.pid
        self.sentinel = os.pidfd_open(self.pid)

    def close(self) -> None:
        if self.sentinel is not None:
            self.process.kill()
            self.process.wait()
            os.close(self.sentinel)


def order_of_ends(needed_bytes: list[int | None], first_waits: bool, tmp_path, monkeypatch):
    """The indices of the processes that ended, in order, and the most that were alive at once."""
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 1000)
    others_ended, order = tmp_path / "others-ended", []
    made = [Run(others_ended if first_waits and not i else None) for i in range(len(needed_bytes))]
    most = 0

    def ended(index: int) -> None:
        nonlocal most
        begun = sum(one.pid is not None for one in made)
        most = max(most, begun - len(order))
        order.append(index)
        assert made[index].process.wait(HANG_S) == 0
        if len(order) == len(made) - 1:
            others_ended.touch()

    try:
        side_by_side.run_all(made, needed_bytes, StopRequest(), ended)
    finally:
        for one in made:
            one.close()
    return order, most


def test_two_run_at_once_and_the_next_begins_when_one_ends(tmp_path, monkeypatch):
    """The first one waits for all the others, which would hang one at a time."""
    assert order_of_ends([500] * 4, True, tmp_path, monkeypatch) == ([1, 2, 3, 0], 2)


@pytest.mark.parametrize("needed_bytes", [600, None])
def test_what_memory_might_not_hold_runs_alone(needed_bytes, tmp_path, monkeypatch):
    """That of one that has begun counts whole, as it may not have it yet."""
    found = order_of_ends([needed_bytes] * 3, False, tmp_path, monkeypatch)
    assert found == ([0, 1, 2], 1)


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
