"""The client's end of the results' path: it receives each message once and in order."""

import contextlib
import logging
import queue
import time
from typing import Any, Protocol

from accbench.launchers.dask import event_log, watch
from accbench.launchers.dask.safe_folder import PendingFile, SafeFolder

log = logging.getLogger(__name__)

# Per sender: what arrives before the client acknowledges it, and before the scheduler drops it.
_ACK_EVENTS, _ACK_BYTES = 64, 16 << 20
_TRUNCATE_BYTES = 64 << 20


class ResultsLostError(RuntimeError):
    """Results that a task sent have not arrived."""


class MessageHandler(Protocol):
    """The receiver of messages from senders."""

    def handle(self, source: str, message: dict[str, Any]) -> None:
        """Handle one message: a part of a file, or all of it."""

    def close_source(self, source: str) -> None:
        """Release what belongs to a sender, from which nothing more comes."""


class Collector:
    """A receiver of all results of a key, also of earlier ones; for use in one thread.

    Args:
        client: a synchronous `distributed.Client`.
        key: names the results.
        handler: receives each message.
    """

    def __init__(self, client: Any, key: str, handler: MessageHandler) -> None:
        self.client, self.key, self.handler = client, key, handler
        self._events: queue.SimpleQueue[tuple[str | None, Any]] = queue.SimpleQueue()
        self._sources: dict[str, _Source] = {}

    def __enter__(self) -> "Collector":
        for hello in watch.subscribe(self.client, self.key, lambda e: self._put(None, e)):
            self._add_source(hello)
        return self

    def __exit__(self, *exc_info: object) -> None:
        topics = [self.key, *(event_log.topic_of(self.key, source) for source in self._sources)]
        for topic in topics:
            with contextlib.suppress(Exception):  # the client may be closed
                self.client.unsubscribe_topic(topic)
        for source in self._sources:
            self.handler.close_source(source)

    def _put(self, source: str | None, event: tuple[float, Any]) -> None:
        self._events.put((source, event[1]))

    def collect(self, seconds: float) -> None:
        """Handle the messages that have come or come within `seconds`.

        Raises:
            ResultsLostError: some results have not arrived.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                source, message = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if source is None:
                self._add_source(message)
            else:
                self._handle(source, message)
            if time.monotonic() > deadline and self._events.empty():
                break
        for source in self._sources:
            self._acknowledge(source)

    def finish(self) -> None:
        """Handle all messages that the scheduler still has, after the senders' tasks have ended.

        Raises:
            ResultsLostError: some results have not arrived.
        """
        self.collect(0)
        for hello in watch.past_messages(self.client, self.key):
            self._add_source(hello)
        for source in list(self._sources):
            for message in watch.past_messages(self.client, event_log.topic_of(self.key, source)):
                self._handle(source, message)
            self._acknowledge(source)
            self._drop_events(source)

    def _add_source(self, hello: dict[str, Any]) -> None:
        source = hello["source"]
        if source in self._sources:
            return
        keys = event_log.received_key(self.key, source)
        self._sources[source] = _Source(hello["worker"], self.client.get_metadata(keys, 0))
        topic = event_log.topic_of(self.key, source)
        for message in watch.subscribe(self.client, topic, lambda e: self._put(source, e)):
            self._handle(source, message)

    def _handle(self, name: str, message: dict[str, Any]) -> None:
        source, number = self._sources[name], message["number"]
        if number < source.num_received:
            return  # it came by subscription and by request
        if number > source.num_received:
            raise ResultsLostError(
                f"results {source.num_received} to {number - 1} of {source.worker} are lost: the "
                "scheduler keeps too few events; start it with "
                "distributed.admin.low-level-log-length of 1000 or more"
            )
        self.handler.handle(name, message)
        source.num_received += 1
        size = len(message["data"])
        source.num_unacknowledged_bytes += size
        source.num_logged_bytes += size
        is_due = source.num_received - source.num_acknowledged >= _ACK_EVENTS
        if is_due or source.num_unacknowledged_bytes >= _ACK_BYTES:
            self._acknowledge(name)
        if source.num_logged_bytes >= _TRUNCATE_BYTES:
            self._drop_events(name)

    def _acknowledge(self, name: str) -> None:
        source = self._sources[name]
        if source.num_acknowledged < source.num_received:
            keys = event_log.received_key(self.key, name)
            self.client.set_metadata(keys, source.num_received)
            source.num_acknowledged, source.num_unacknowledged_bytes = source.num_received, 0

    def _drop_events(self, name: str) -> None:
        """Make the scheduler drop the received events, which it keeps in memory."""
        source = self._sources[name]
        if not source.num_logged_bytes:
            return
        source.num_logged_bytes = 0
        topic = event_log.topic_of(self.key, name)

        # A nested function is pickled by value: the scheduler may lack accbench.
        def truncate(dask_scheduler: Any) -> None:
            broker = getattr(dask_scheduler, "_broker", None)
            if broker is not None:
                broker.truncate(topic)

        try:
            self.client.run_on_scheduler(truncate)
        except Exception as error:  # the scheduler may forbid this; then its memory grows
            log.debug("Dask's scheduler keeps results in memory: %s", error)


class _Source:
    def __init__(self, worker: str, num_received: int) -> None:
        self.worker, self.num_received = worker, num_received
        self.num_acknowledged, self.num_unacknowledged_bytes, self.num_logged_bytes = (
            num_received,
            0,
            0,
        )


class FileWriter:
    """A message handler that writes results into a folder, and refuses paths that lead outside."""

    def __init__(self, folder: SafeFolder) -> None:
        self.folder = folder
        self.refused: list[str] = []
        self._pending: dict[str, PendingFile] = {}

    def handle(self, source: str, message: dict[str, Any]) -> None:
        """Append to a file, remove it, or write a part of it."""
        path, kind = message["path"], message["kind"]
        try:
            if kind == "append":
                self.folder.append(path, message["data"])
            elif kind == "remove":
                self.folder.remove(path)
            elif kind == "whole":
                self._write_part(source, message)
        except (ValueError, OSError) as error:
            self.refused.append(f"{path!r}: {error}")
            self.close_source(source)

    def _write_part(self, source: str, message: dict[str, Any]) -> None:
        if message["part"] == 0:
            self.close_source(source)
            self._pending[source] = self.folder.create(message["path"])
        file = self._pending.get(source)
        if file is None:  # its first part could not be written
            return
        file.write(message["data"])
        if message["part"] == message["num_parts"] - 1:
            del self._pending[source]
            file.commit()

    def close_source(self, source: str) -> None:
        """Discard a sender's incomplete file."""
        file = self._pending.pop(source, None)
        if file is not None:
            file.discard()
