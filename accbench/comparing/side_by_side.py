"""Processes that run at once, as nobody times them.

A pass of the numerics starts, and compiles, with few cores busy, while another can compute.
"""

import multiprocessing.connection
from collections.abc import Callable, Sequence

from accbench.comparing.run import StopRequest
from accbench.comparing.turns import Process, available_bytes

_MOST = 3


def run_all(
    processes: Sequence[Process], needed_bytes: Sequence[int | None], stop: StopRequest,
    ended: Callable[[int], None],
) -> None:  # fmt: skip
    """Run processes to their ends, three at once where memory holds them.

    Args:
        processes: not started yet.
        needed_bytes: the memory that each one needs; None: not known, so that it runs alone.
        stop: a request to stop, which is raised here.
        ended: called with the index of each process that has ended.
    """
    alive: list[int] = []
    for index, process in enumerate(processes):
        while alive and not _is_room([needed_bytes[other] for other in (*alive, index)]):
            alive = _wait_for_one(processes, alive, ended)
        process.start(stop)
        alive.append(index)
    while alive:
        alive = _wait_for_one(processes, alive, ended)


def _is_room(needed_bytes: Sequence[int | None]) -> bool:
    """Return whether processes may run at once; those that have begun may not have it all yet."""
    known = [size for size in needed_bytes if size is not None]
    if len(known) < len(needed_bytes) or len(known) > _MOST:
        return False
    return available_bytes() >= sum(known)


def _wait_for_one(
    processes: Sequence[Process], alive: list[int], ended: Callable[[int], None]
) -> list[int]:
    """Wait until one that is alive ends, and return the others."""
    ready = multiprocessing.connection.wait([processes[index].sentinel for index in alive])
    done = [index for index in alive if processes[index].sentinel in ready]
    for index in done:
        ended(index)
    return [index for index in alive if index not in done]
