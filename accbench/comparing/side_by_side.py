"""Processes that run at once, as nobody times them.

A pass of the numerics starts, and compiles, with few cores busy, while another can compute.
"""

import multiprocessing.connection
from collections.abc import Callable, Sequence

from accbench.comparing.run import StopRequest
from accbench.comparing.turns import Process, available_bytes

_MOST = 2


def run_all(
    processes: Sequence[Process], needed_bytes: Sequence[int | None], stop: StopRequest,
    ended: Callable[[int], None],
) -> None:  # fmt: skip
    """Run processes to their ends, two at once where memory holds them.

    Args:
        processes: not started yet.
        needed_bytes: the memory that each one needs; None: not known, so that it begins alone.
        stop: a request to stop, which is raised here.
        ended: called with the index of each process that has ended.
    """
    alive: list[int] = []
    for index, process in enumerate(processes):
        while alive and not _is_room(needed_bytes[index], len(alive)):
            alive = _wait_for_one(processes, alive, ended)
        process.start(stop)
        alive.append(index)
    while alive:
        alive = _wait_for_one(processes, alive, ended)


def _is_room(needed_bytes: int | None, num_alive: int) -> bool:
    if needed_bytes is None or num_alive >= _MOST:
        return False
    return available_bytes() >= needed_bytes


def _wait_for_one(
    processes: Sequence[Process], alive: list[int], ended: Callable[[int], None]
) -> list[int]:
    """Wait until one that is alive ends, and return the others."""
    ready = multiprocessing.connection.wait([processes[index].sentinel for index in alive])
    done = [index for index in alive if processes[index].sentinel in ready]
    for index in done:
        ended(index)
    return [index for index in alive if index not in done]
