"""The client's watch over a call: a lost Dask worker or a failed rank ends it for all ranks."""

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from accbench.launchers.dask.rank_assignment import RankAssignment, dask_workers, metadata_key

_SUBSCRIBE_S = 60.0
_LOCK = threading.Lock()


class _ClientCalls:
    """A client's calls, and the Dask workers to whose events it has subscribed."""

    def __init__(self) -> None:
        self.watched: dict[str, _WatchedCall] = {}
        self.subscribed: set[str] = set()


# A client subscribes to the topics of single Dask workers: the topic "all" would also announce the
# client's own end, about which the scheduler then complains.
_calls_by_client: "weakref.WeakKeyDictionary[Any, _ClientCalls]" = weakref.WeakKeyDictionary()


class _WatchedCall:
    def __init__(self, ranks: dict[Any, RankAssignment]) -> None:
        # Weak references, because a client releases futures that nobody else holds.
        self.futures = weakref.WeakKeyDictionary(ranks)
        self.assignments = {future.key: assignment for future, assignment in ranks.items()}

    def affected(
        self, address: str, lost_keys: Iterable[Any]
    ) -> tuple[RankAssignment | None, list[Any]]:
        """Return the rank whose Dask worker has left, and the futures that can no longer succeed.

        Args:
            address: the address of the Dask worker that has left.
            lost_keys: keys of tasks whose results only that worker held.
        """
        lost = next((p for p in self.assignments.values() if p.address == address), None)
        if lost is None:
            return None, []
        futures = list(self.futures.items())
        unfinished = [f for f, _ in futures if f.status in ("pending", "lost")]
        results_lost = [f for f, _ in futures if f.status == "finished" and f.key in lost_keys]
        if not any(assignment.address == address for f, assignment in futures if f in unfinished):
            unfinished = []  # that rank has finished, and the others do not need it
        return lost, unfinished + results_lost


def watch(client: Any, call_id: str, ranks: dict[Any, RankAssignment]) -> None:
    """Watch the futures of a call as long as somebody holds them.

    Args:
        client: a synchronous `distributed.Client`.
        call_id: names the call.
        ranks: future -> its rank's assignment.
    """
    call = _WatchedCall(ranks)

    def done(future: Any) -> None:
        if future.status == "error":
            set_call_metadata(
                client, call_id, "failed", f"{call.assignments[future.key]} has failed"
            )

    with _LOCK:
        calls = _calls_by_client.setdefault(client, _ClientCalls())
        calls.watched = {name: other for name, other in calls.watched.items() if other.futures}
        calls.watched[call_id] = call
        new_addresses = sorted(
            {assignment.address for assignment in ranks.values()} - calls.subscribed
        )
        calls.subscribed.update(new_addresses)
    for address in new_addresses:
        client.subscribe_topic(address, _removal_handler(client, address))
    if new_addresses:
        last = new_addresses[-1]
        await_subscription(client, last, _removal_handler(client, last))
    for future in ranks:
        future.add_done_callback(done)
    present = dask_workers(client)
    for address in {assignment.address for assignment in ranks.values()} - present.keys():
        client.sync(_cancel_affected, client, address, ())  # lost before the subscription


def set_call_metadata(client: Any, call_id: str, name: str, value: Any) -> None:
    """Set a value that all ranks of a call can read."""
    client.set_metadata([*metadata_key(call_id), name], value)


def _removal_handler(client: Any, address: str) -> Callable[[Any], Any]:
    client_ref = weakref.ref(client)

    async def handle(event: tuple[float, Any]) -> None:
        message = event[1]
        if message.get("action") == "remove-worker" and (live := client_ref()) is not None:
            await _cancel_affected(live, address, message.get("lost-computed-tasks") or ())

    return handle


async def _cancel_affected(client: Any, address: str, lost_keys: Iterable[Any]) -> None:
    with _LOCK:
        calls = list(_calls_by_client[client].watched.values())
    for call in calls:
        assignment, futures = call.affected(address, lost_keys)
        if futures:
            await client.cancel(
                futures, asynchronous=True, force=True, reason="worker-lost",
                msg=f"{assignment} has left the cluster",
            )  # fmt: skip


def subscribe(client: Any, topic: str, handler: Callable[[Any], Any]) -> list[Any]:
    """Subscribe a handler to a topic, and return the topic's earlier messages.

    A message may come both ways, but none is missed.

    Args:
        client: a synchronous `distributed.Client`.
        topic: the topic of the event log.
        handler: called in the client's event loop with (seconds, message).

    Raises:
        TimeoutError: the scheduler does not answer.
    """
    await_subscription(client, topic, handler)
    return past_messages(client, topic)


def past_messages(client: Any, topic: str) -> list[Any]:
    """Return the messages of a topic that the scheduler still has."""
    messages = [message for _, message in client.get_events(topic)]
    return [message for message in messages if not _is_marker(message)]


def await_subscription(client: Any, topic: str, handler: Callable[[Any], Any]) -> None:
    """Subscribe a handler, and wait until this and all earlier subscriptions take effect.

    Raises:
        TimeoutError: the scheduler does not answer.
    """
    marker, received = uuid.uuid4().hex, threading.Event()

    def handle_or_mark(event: tuple[float, Any]) -> Any:
        if not _is_marker(event[1]):
            return handler(event)
        if event[1]["marker"] == marker:
            received.set()
        return None

    client.subscribe_topic(topic, handle_or_mark)
    deadline = time.monotonic() + _SUBSCRIBE_S
    # A subscription travels on another stream than a request, and may arrive after it.
    while True:
        client.log_event(topic, {"marker": marker, "action": "accbench-marker"})
        if received.wait(0.05):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"Dask's scheduler sends no events of {topic!r}")


def _is_marker(message: Any) -> bool:
    return isinstance(message, dict) and "marker" in message
