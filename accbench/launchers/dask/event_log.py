"""The task's end of the results' path: numbered events in Dask's event log.

Each sender has a topic of its own, and numbers its events. The scheduler keeps the last 1000
events of a topic (`distributed.admin.low-level-log-length`) and forwards new ones to subscribers.
A sender may only be a limited number of events ahead of the client's acknowledgements, so that
nothing is lost before the client subscribes, and nothing piles up if the client is slow.
"""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from accbench.launchers.dask.rank_assignment import call_scheduler

# Bytes of an event. For debugging, Dask keeps in memory the last thousand sent batches that are
# smaller than a million bytes; larger ones it drops.
PART_BYTES = 1 << 20
# How far a sender may be ahead of the client; fewer events than the scheduler keeps.
_AHEAD_EVENTS, _AHEAD_BYTES = 500, 256 << 20
_POLL_S = 0.01
# Seconds without progress at the client until a sender gives up.
STALL_TIMEOUT_S = 300.0


class NotCollectedError(RuntimeError):
    """The client does not collect the results."""


def topic_of(key: str, source: str) -> str:
    """Return the topic of a sender's events."""
    return f"{key}/{source}"


def received_key(key: str, source: str) -> list[str]:
    """Return the scheduler's metadata key of the number of events that the client has received."""
    return ["accbench-results", key, source]


class EventSender:
    """A task's sender of messages; the scheduler has each one when `send` returns.

    So they survive if this process is then killed.

    Attributes:
        check: called often while a message is sent, which can take minutes; it may raise an error
            to give up.
    """

    def __init__(self, key: str) -> None:
        self.check: Callable[[], None] = lambda: None
        self.key, self.source = key, uuid.uuid4().hex[:16]
        self._worker = _current_worker()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._unacknowledged: deque[int] = deque()  # bytes of each unacknowledged event
        hello = {"source": self.source, "worker": self._worker.address}
        call_scheduler(self._worker, "log_event", topic=key, msg=hello)

    def send(self, kind: str, path: str, data: bytes) -> None:
        """Send a message in parts; waits while the client is far behind.

        Args:
            kind: whole, append, remove, print or outcome; see `collecting` and `driving`.
            path: the file in the client's folder.
            data: the file's content.

        Raises:
            NotCollectedError: the client does not collect the results.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("results are submitted by the task's own process, not by a child")
        view, num_parts = memoryview(data), max(1, -(-len(data) // PART_BYTES))
        with self._lock:
            for part in range(num_parts):
                self.check()
                chunk = bytes(view[part * PART_BYTES : (part + 1) * PART_BYTES])
                self._wait_for_room(len(chunk))
                message = {
                    "number": self._number, "kind": kind, "path": path, "part": part,
                    "num_parts": num_parts, "data": chunk,
                }  # fmt: skip
                call_scheduler(
                    self._worker, "log_event", topic=topic_of(self.key, self.source), msg=message
                )
                self._number += 1
                self._unacknowledged.append(len(chunk))

    def _wait_for_room(self, num_bytes: int) -> None:
        last_progress = time.monotonic()
        while not self._has_room(num_bytes):
            keys = received_key(self.key, self.source)
            received = call_scheduler(self._worker, "get_metadata", keys=keys, default=0)
            progress = received - (self._number - len(self._unacknowledged))
            for _ in range(progress):
                self._unacknowledged.popleft()
            if progress > 0:
                last_progress = time.monotonic()
            self.check()
            if progress <= 0 and time.monotonic() - last_progress > STALL_TIMEOUT_S:
                raise NotCollectedError(
                    f"the client has not collected the results of {self.key!r} for "
                    f"{STALL_TIMEOUT_S:g} s: call process_results(folder, futures) at the client "
                    "before waiting for the futures"
                )
            if progress <= 0:
                time.sleep(_POLL_S)

    def _has_room(self, num_bytes: int) -> bool:
        has_event = len(self._unacknowledged) < _AHEAD_EVENTS
        return has_event and (
            not self._unacknowledged or sum(self._unacknowledged) + num_bytes <= _AHEAD_BYTES
        )


def _current_worker() -> Any:
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        raise RuntimeError(
            "results can only be sent by a task on a Dask worker, from its own thread"
        ) from None
