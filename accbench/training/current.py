"""The worker that this process is, for `accbench.accelerate` in a script that it runs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology


@dataclasses.dataclass
class Worker:
    """A worker's task and connections, and the run that its script makes."""

    task: TaskConfig
    topology: Topology
    started: float
    """`time.perf_counter()` when the process began."""
    console: Any
    """The terminal's console, on rank 0."""
    engine: Any = None
    """The engine that trains; None until it is opened."""
    watch: Callable[[Any], Any] | None = None
    """Called with the run that the script begins; returns a listener for its steps."""
    run: Any = None
    """The script's run, once it has begun."""


_current: Worker | None = None


def worker() -> Worker | None:
    """Return this process's worker; None where a person started the script."""
    return _current


@contextlib.contextmanager
def use_worker(new: Worker) -> Iterator[Worker]:
    """Make `worker()` return `new` in the block."""
    global _current
    before, _current = _current, new
    try:
        yield new
    finally:
        _current = before
