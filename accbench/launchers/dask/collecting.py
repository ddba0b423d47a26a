"""The client's end of the way that results go: everything that was sent, once and in order."""

import contextlib
import logging
import queue
import time
from typing import Any, Protocol

from accbench.launchers.dask import sending, watch
from accbench.launchers.dask.below import Below, Unfinished

log = logging.getLogger(__name__)

# Of one sender: what may come in before it is told, and before the scheduler is to forget.
_TELL_EVENTS, _TELL_BYTES = 64, 16 << 20
_FORGET_BYTES = 64 << 20


class ResultsLostError(RuntimeError):
    """Results that were handed over have not arrived."""


class Taker(Protocol):
    """What is done with results."""

    def take(self, source: str, message: dict[str, Any]) -> None:
        """One event: a part of a file, or all of it."""

    def gone(self, source: str) -> None:
        """Nothing more comes from this sender."""


class Collector:
    """Takes all results of a key, from before it began, too; for one thread.

    Args:
        client: of distributed, not an asynchronous one.
    """

    def __init__(self, client: Any, key: str, taker: Taker) -> None:
        self.client, self.key, self.taker = client, key, taker
        self._events: queue.SimpleQueue[tuple[str | None, Any]] = queue.SimpleQueue()
        self._sources: dict[str, _Source] = {}

    def __enter__(self) -> "Collector":
        for hello in watch.subscribe(self.client, self.key, lambda e: self._put(None, e)):
            self._meet(hello)
        return self

    def __exit__(self, *exc_info: object) -> None:
        topics = [self.key, *(sending.topic_of(self.key, source) for source in self._sources)]
        for topic in topics:
            with contextlib.suppress(Exception):  # the client may be closed
                self.client.unsubscribe_topic(topic)
        for source in self._sources:
            self.taker.gone(source)

    def _put(self, source: str | None, event: tuple[float, Any]) -> None:
        self._events.put((source, event[1]))

    def collect(self, seconds: float) -> None:
        """Take what has come or comes within so many seconds.

        Raises:
            ResultsLostError: some have not arrived.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                source, message = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if source is None:
                self._meet(message)
            else:
                self._take(source, message)
            if time.monotonic() > until and self._events.empty():
                break
        for source in self._sources:
            self._tell(source)

    def finish(self) -> None:
        """Take all that the scheduler has, after the senders' tasks have ended.

        Raises:
            ResultsLostError: some have not arrived.
        """
        self.collect(0)
        for hello in watch.before(self.client, self.key):
            self._meet(hello)
        for source in list(self._sources):
            for message in watch.before(self.client, sending.topic_of(self.key, source)):
                self._take(source, message)
            self._tell(source)
            self._forget(source)

    def _meet(self, hello: dict[str, Any]) -> None:
        source = hello["source"]
        if source in self._sources:
            return
        keys = sending.received_key(self.key, source)
        self._sources[source] = _Source(hello["worker"], self.client.get_metadata(keys, 0))
        topic = sending.topic_of(self.key, source)
        for message in watch.subscribe(self.client, topic, lambda e: self._put(source, e)):
            self._take(source, message)

    def _take(self, name: str, message: dict[str, Any]) -> None:
        source, number = self._sources[name], message["number"]
        if number < source.num_received:
            return  # it came both ways
        if number > source.num_received:
            raise ResultsLostError(
                f"results {source.num_received} to {number - 1} of {source.worker} are lost: the "
                "scheduler keeps too few events, set distributed.admin.low-level-log-length to "
                "1000 or more where it is started"
            )
        self.taker.take(name, message)
        source.num_received += 1
        size = len(message["data"])
        source.num_untold_bytes += size
        source.num_kept_bytes += size
        late = source.num_received - source.num_told >= _TELL_EVENTS
        if late or source.num_untold_bytes >= _TELL_BYTES:
            self._tell(name)
        if source.num_kept_bytes >= _FORGET_BYTES:
            self._forget(name)

    def _tell(self, name: str) -> None:
        source = self._sources[name]
        if source.num_told < source.num_received:
            keys = sending.received_key(self.key, name)
            self.client.set_metadata(keys, source.num_received)
            source.num_told, source.num_untold_bytes = source.num_received, 0

    def _forget(self, name: str) -> None:
        """Have the scheduler drop the events that are here now, which it keeps in memory."""
        source = self._sources[name]
        if not source.num_kept_bytes:
            return
        source.num_kept_bytes = 0
        topic = sending.topic_of(self.key, name)

        # A function within a function travels whole: the scheduler may lack accbench.
        def truncate(dask_scheduler: Any) -> None:
            broker = getattr(dask_scheduler, "_broker", None)
            if broker is not None:
                broker.truncate(topic)

        try:
            self.client.run_on_scheduler(truncate)
        except Exception as error:  # it may forbid this; then it costs memory
            log.debug("Dask's scheduler keeps results in memory: %s", error)


class _Source:
    def __init__(self, worker: str, num_received: int) -> None:
        self.worker, self.num_received = worker, num_received
        self.num_told, self.num_untold_bytes, self.num_kept_bytes = num_received, 0, 0


class Files:
    """Writes results below a folder; what would lead elsewhere is refused."""

    def __init__(self, folder: Below) -> None:
        self.folder = folder
        self.refused: list[str] = []
        self._begun: dict[str, Unfinished] = {}

    def take(self, source: str, message: dict[str, Any]) -> None:
        """A file's part, its addition, or its end."""
        path, kind = message["path"], message["kind"]
        try:
            if kind == "append":
                self.folder.append(path, message["data"])
            elif kind == "remove":
                self.folder.remove(path)
            elif kind == "whole":
                self._part(source, message)
        except (ValueError, OSError) as error:
            self.refused.append(f"{path!r}: {error}")
            self.gone(source)

    def _part(self, source: str, message: dict[str, Any]) -> None:
        if message["part"] == 0:
            self.gone(source)
            self._begun[source] = self.folder.begin(message["path"])
        file = self._begun.get(source)
        if file is None:  # its beginning could not be written
            return
        file.write(message["data"])
        if message["part"] == message["num_parts"] - 1:
            del self._begun[source]
            file.finish()

    def gone(self, source: str) -> None:
        """Drop what is unfinished."""
        file = self._begun.pop(source, None)
        if file is not None:
            file.drop()
