"""A task's end of the way that results go to the client: Dask's event log, numbered.

Each sender has a topic of its own, and numbers what it puts there. The scheduler keeps the last
1000 events of a topic (`distributed.admin.low-level-log-length`) and passes them on to whoever
listens at the time. So that nothing is lost before somebody listens, nor piles up where nobody
can keep pace, a sender is so many events at most ahead of what the client says that it has.
"""

import os
import threading
import time
import uuid
from collections import deque
from typing import Any

from accbench.launchers.dask.places import ask_scheduler

# Bytes of an event. Dask keeps the last thousand batches below a million bytes that it sent in
# memory, for its developers; larger ones it does not.
PART_BYTES = 1 << 20
# What a sender may be ahead; fewer than the scheduler keeps.
_AHEAD_EVENTS, _AHEAD_BYTES = 500, 256 << 20
_POLL_S = 0.01
# Seconds without any progress at the client.
PATIENCE_S = 300.0


class NotCollectedError(RuntimeError):
    """Nobody takes the results at the client."""


def topic_of(key: str, source: str) -> str:
    """Where a sender's events go."""
    return f"{key}/{source}"


def received_key(key: str, source: str) -> list[str]:
    """Where the scheduler keeps how many of a sender's events the client has."""
    return ["accbench-results", key, source]


class Sender:
    """Of one task; what it has sent the scheduler has, also where this process is then killed."""

    def __init__(self, key: str) -> None:
        self.key, self.source = key, uuid.uuid4().hex[:16]
        self._worker = _this_worker()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._ahead: deque[int] = deque()  # bytes of events that the client may not have yet
        hello = {"source": self.source, "worker": self._worker.address}
        ask_scheduler(self._worker, "log_event", topic=key, msg=hello)

    def send(self, kind: str, path: str, data: bytes) -> None:
        """Hand over, in parts; waits while the client is far behind.

        Args:
            kind: whole, append, remove or print; see `collecting`.

        Raises:
            NotCollectedError: the client takes nothing.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("results are submitted by the task's own process, not by a child")
        view, num_parts = memoryview(data), max(1, -(-len(data) // PART_BYTES))
        with self._lock:
            for part in range(num_parts):
                chunk = bytes(view[part * PART_BYTES : (part + 1) * PART_BYTES])
                self._wait_for_room(len(chunk))
                message = {
                    "number": self._number, "kind": kind, "path": path, "part": part,
                    "num_parts": num_parts, "data": chunk,
                }  # fmt: skip
                ask_scheduler(
                    self._worker, "log_event", topic=topic_of(self.key, self.source), msg=message
                )
                self._number += 1
                self._ahead.append(len(chunk))

    def _wait_for_room(self, num_bytes: int) -> None:
        began = time.monotonic()
        while not self._has_room(num_bytes):
            keys = received_key(self.key, self.source)
            received = ask_scheduler(self._worker, "get_metadata", keys=keys, default=0)
            progress = received - (self._number - len(self._ahead))
            for _ in range(progress):
                self._ahead.popleft()
            if progress > 0:
                began = time.monotonic()
            elif time.monotonic() - began > PATIENCE_S:
                raise NotCollectedError(
                    f"nobody has taken the results of {self.key!r} for {PATIENCE_S:g} s: call "
                    "process_results(folder, futures) at the client before waiting for the futures"
                )
            else:
                time.sleep(_POLL_S)

    def _has_room(self, num_bytes: int) -> bool:
        few = len(self._ahead) < _AHEAD_EVENTS
        return few and (not self._ahead or sum(self._ahead) + num_bytes <= _AHEAD_BYTES)


def _this_worker() -> Any:
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        raise RuntimeError("results come from a task on a Dask worker, in its own thread") from None
