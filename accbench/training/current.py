"""The worker that this process is, for `accbench.accelerate` in a script that it runs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology


@dataclasses.dataclass
class Worker:
    """What a launcher has decided, and the run that the script makes of it."""

    task: TaskConfig
    topology: Topology
    started: float
    """`time.perf_counter()` when the process began."""
    console: Any
    """The terminal's, on rank 0."""
    engine: Any = None
    """The task's, or what is to train in its place; None: to be made."""
    watch: Callable[[Any], Any] | None = None
    """Called with the run that the script begins; returns what is told of its steps."""
    run: Any = None
    """Once the script has begun one."""


_current: Worker | None = None


def worker() -> Worker | None:
    """This process's; None where a person started the script."""
    return _current


@contextlib.contextmanager
def entered(new: Worker) -> Iterator[Worker]:
    """`worker()` gives `new` in the block."""
    global _current
    before, _current = _current, new
    try:
        yield new
    finally:
        _current = before
