"""Runs that are alive at once and train their windows in turn, on one machine.

A machine whose speed changes within seconds, because others share its processors' caches and
memory, then slows all rows alike: windows that are held against each other lie next to each other
in time (Abedi and Brecht, Conducting Repeatable Experiments in Highly Variable Cloud Computing
Environments, 2017, call it randomized multiple interleaved trials).
"""

import contextlib
import itertools
import multiprocessing.connection
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from accbench.comparing.run import StopRequest
from accbench.system import cgroups, turns

# A run needs more memory than it has in its first window, and the others keep theirs.
_MEMORY_MARGIN = 1.5
# Paths of sockets have 103 characters at most, on macOS.
_LONGEST_FOLDER = 70


class Process(Protocol):
    """A run's process, such as `accbench.comparing.run.JobProcess`."""

    @property
    def pid(self) -> int | None:
        """Return its process id; None before it starts."""

    @property
    def sentinel(self) -> int:
        """Return what `multiprocessing.connection.wait` takes, ready once the process has ended."""

    def start(self, stop: StopRequest) -> None:
        """Start it."""


class TurnGiver:
    """The end of one run's connections at which turns are given.

    Args:
        num_workers: workers of the run, each of which connects.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER
        self._folder = tempfile.TemporaryDirectory(
            prefix="accbench-turns-", dir="/tmp" if is_long else None
        )
        self.path = Path(self._folder.name) / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(num_workers)
        self._connections: list[socket.socket] = []
        self._waiting: list[socket.socket] = []
        self._num_finished = 0

    @property
    def is_finished(self) -> bool:
        """Return whether all workers wait behind their last windows, only to end."""
        return self._num_finished == self.num_workers

    def give(self, is_alone: bool = False) -> None:
        """Let the run go on, and tell it whether it is alone, with no other in between."""
        for connection in self._waiting:
            try:
                connection.sendall(turns.GO_ON_ALONE if is_alone else turns.GO)
            except OSError:  # this worker is gone, and its launcher ends the others
                self._drop(connection)
        self._waiting = []

    def wait(self, process: Process) -> bool:
        """Wait until all workers wait for a turn; returns False if the run has ended instead."""
        while len(self._waiting) < self.num_workers:
            running = [c for c in self._connections if c not in self._waiting]
            ready = multiprocessing.connection.wait([process.sentinel, self._listener, *running])
            for one in ready:
                if one is self._listener:
                    self._connections.append(self._listener.accept()[0])
                    if len(self._connections) == self.num_workers:
                        self._folder.cleanup()  # of a comparison that is killed none is left
                elif isinstance(one, socket.socket):
                    self._hear(one)
            if process.sentinel in ready:
                return False
        return True

    def _hear(self, connection: socket.socket) -> None:
        try:
            heard = connection.recv(1)
        except OSError:
            heard = b""
        if heard:
            self._waiting.append(connection)
            self._num_finished += heard == turns.LAST_WINDOW_DONE
        else:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._connections.remove(connection)
        connection.close()

    def close(self) -> None:
        """Close the connections, so that nothing waits any more, and remove the socket."""
        for one in (self._listener, *self._connections):
            one.close()
        self._folder.cleanup()


def take_turns(
    processes: Sequence[Process], givers: Sequence[TurnGiver], stop: StopRequest
) -> None:
    """Start runs and let them train their windows in turn until all have ended.

    The first turn of a run is its start, and the warm-up. Where memory would not hold one more run,
    those that are alive end first.

    Args:
        processes: one a run, not started yet.
        givers: of each run.
        stop: a request to stop, which is raised here.
    """
    alive: list[tuple[Process, TurnGiver]] = []
    largest_bytes = 0
    for process, giver in zip(processes, givers, strict=True):
        if alive and available_bytes() < _MEMORY_MARGIN * largest_bytes:
            _alternate(alive)
            alive = []
        process.start(stop)
        if giver.wait(process):
            alive.append((process, giver))
            largest_bytes = max(largest_bytes, _bytes_below(process.pid))
    _alternate(alive)


def _alternate(alive: list[tuple[Process, TurnGiver]]) -> None:
    """Give turns until all have ended, forwards and backwards: A B C, C B A, A B C.

    They end at once, each behind its last window, as nobody times their ends.
    """
    is_alone = len(alive) == 1
    finished = [pair for pair in alive if pair[1].is_finished]
    alive = [pair for pair in alive if pair not in finished]
    for cycle in itertools.count():
        if not alive:
            break
        for pair in alive if cycle % 2 == 0 else alive[::-1]:
            process, giver = pair
            giver.give(is_alone)
            goes_on = giver.wait(process)
            if not goes_on or giver.is_finished:
                alive = [other for other in alive if other is not pair]
                finished += [pair] if goes_on else []
    for _, giver in finished:
        giver.give(is_alone)
    for process, giver in finished:
        giver.wait(process)


def available_bytes() -> int:
    """Return the memory that this machine, or the container's limit, leaves."""
    available_bytes = psutil.virtual_memory().available
    limit = cgroups.memory_limit_bytes()
    if limit is not None:
        available_bytes = min(available_bytes, limit - _bytes_below(os.getpid()))
    return int(available_bytes)


def _bytes_below(pid: int | None) -> int:
    """Return the resident memory of a process and of those below it."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
