"""The client's side of a call: a Dask worker that leaves, or a rank that fails, ends it for all."""

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from accbench.launchers.dask.places import Place, metadata_key

_SUBSCRIBE_S = 60.0
_LOCK = threading.Lock()


class _Calls:
    """Of one client: the calls to look after, and the Dask workers whose events it hears."""

    def __init__(self) -> None:
        self.watched: dict[str, _Call] = {}
        self.heard: set[str] = set()


# A client's own topics are those of Dask workers' addresses: of the topic "all" it would be told
# that it has gone itself, which the scheduler then complains of.
_of_client: "weakref.WeakKeyDictionary[Any, _Calls]" = weakref.WeakKeyDictionary()


class _Call:
    def __init__(self, ranks: dict[Any, Place]) -> None:
        # Not the futures themselves, which a client lets go of when nobody else holds them.
        self.futures = weakref.WeakKeyDictionary(ranks)
        self.places = {future.key: place for future, place in ranks.items()}

    def affected(self, address: str, lost_keys: Iterable[Any]) -> tuple[Place | None, list[Any]]:
        """Whose Dask worker has left, and the futures that nothing will come of now.

        Args:
            lost_keys: of tasks whose results were on that worker alone.
        """
        gone = next((p for p in self.places.values() if p.address == address), None)
        if gone is None:
            return None, []
        futures = list(self.futures.items())
        unfinished = [f for f, _ in futures if f.status in ("pending", "lost")]
        ended_there = [f for f, _ in futures if f.status == "finished" and f.key in lost_keys]
        if not any(place.address == address for f, place in futures if f in unfinished):
            unfinished = []  # that rank had ended, and the others do not need it
        return gone, unfinished + ended_there


def watch(client: Any, call_id: str, ranks: dict[Any, Place]) -> None:
    """Look after the futures of a call as long as somebody holds them.

    Args:
        ranks: future -> its rank's place.
    """
    call = _Call(ranks)

    def done(future: Any) -> None:
        if future.status == "error":
            tell(client, call_id, "failed", f"{call.places[future.key]} has failed")

    with _LOCK:
        calls = _of_client.setdefault(client, _Calls())
        calls.watched = {name: known for name, known in calls.watched.items() if known.futures}
        calls.watched[call_id] = call
        unheard = sorted({place.address for place in ranks.values()} - calls.heard)
        calls.heard.update(unheard)
    for address in unheard:
        client.subscribe_topic(address, _hears(client, address))
    if unheard:
        await_subscription(client, unheard[-1], _hears(client, unheard[-1]))
    for future in ranks:
        future.add_done_callback(done)
    there = client.scheduler_info(n_workers=-1)["workers"]
    for address in {place.address for place in ranks.values()} - there.keys():
        client.sync(_left, client, address, ())  # before anybody listened


def tell(client: Any, call_id: str, name: str, value: Any) -> None:
    """Tell all ranks of a call."""
    client.set_metadata([*metadata_key(call_id), name], value)


def _hears(client: Any, address: str) -> Callable[[Any], Any]:
    known = weakref.ref(client)

    async def heard(event: tuple[float, Any]) -> None:
        message = event[1]
        if message.get("action") == "remove-worker" and (here := known()) is not None:
            await _left(here, address, message.get("lost-computed-tasks") or ())

    return heard


async def _left(client: Any, address: str, lost_keys: Iterable[Any]) -> None:
    with _LOCK:
        calls = list(_of_client[client].watched.values())
    for call in calls:
        place, futures = call.affected(address, lost_keys)
        if futures:
            await client.cancel(
                futures, asynchronous=True, force=True, reason="worker-lost",
                msg=f"{place} has left the cluster",
            )  # fmt: skip


def subscribe(client: Any, topic: str, handler: Callable[[Any], Any]) -> list[Any]:
    """Have a handler get all events of a topic from now on; returns those that were before.

    Some may be in both, and none is in neither.

    Args:
        handler: called in the client's event loop with (seconds, message).

    Raises:
        TimeoutError: the scheduler does not answer.
    """
    await_subscription(client, topic, handler)
    return before(client, topic)


def before(client: Any, topic: str) -> list[Any]:
    """The messages of a topic that the scheduler still has."""
    found = [message for _, message in client.get_events(topic)]
    return [message for message in found if not _is_marker(message)]


def await_subscription(client: Any, topic: str, handler: Callable[[Any], Any]) -> None:
    """Subscribe, and wait until this subscription, and those before it, are in force.

    Raises:
        TimeoutError: the scheduler does not answer.
    """
    marker, heard = uuid.uuid4().hex, threading.Event()

    def marked(event: tuple[float, Any]) -> Any:
        if not _is_marker(event[1]):
            return handler(event)
        if event[1]["marker"] == marker:
            heard.set()
        return None

    client.subscribe_topic(topic, marked)
    until = time.monotonic() + _SUBSCRIBE_S
    # A subscription goes another way than a request, and may be behind it.
    while True:
        client.log_event(topic, {"marker": marker, "action": "accbench-marker"})
        if heard.wait(0.05):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"Dask's scheduler sends no events of {topic!r}")


def _is_marker(message: Any) -> bool:
    return isinstance(message, dict) and "marker" in message
