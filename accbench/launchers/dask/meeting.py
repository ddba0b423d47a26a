"""Where the ranks of a call meet: a store that rank 0's Dask worker holds, at a port of its own."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from accbench import network
from accbench.launchers.dask.places import Place, ask_scheduler, metadata_key

# Seconds between two looks at whether the others have come, and whether the call still goes on.
_POLL_S, _LOOK_S = 0.02, 1.0
# Seconds that rank 0 keeps the store for those that still leave.
_LEAVE_S = 5.0
# As long as torch's store lets itself be waited for, and how long a try to reach it is.
_CONNECT_S, _TRY = 300.0, timedelta(seconds=3)
# As long as it waits by itself; a call decides how long it goes on.
_HELD = timedelta(hours=24)


class CallEndedError(RuntimeError):
    """The call that this rank is of has been cancelled, or another rank of it has failed."""


class Call:
    """A call as one of its ranks sees it, in a task on a Dask worker.

    Args:
        key: of this rank's task.
    """

    def __init__(self, call_id: str, key: Any, worker: Any) -> None:
        self.call_id, self.key, self.worker = call_id, key, worker
        self._looked_at = 0.0

    def told(self) -> dict[str, Any]:
        """What has been told to all ranks: `store` by rank 0, `failed` and `stop` by the client."""
        keys = metadata_key(self.call_id)
        return ask_scheduler(self.worker, "get_metadata", keys=keys, default=None) or {}

    def tell(self, name: str, value: Any) -> None:
        """Tell all ranks."""
        keys = [*metadata_key(self.call_id), name]
        ask_scheduler(self.worker, "set_metadata", keys=keys, value=value)

    def goes_on(self) -> bool:
        """Whether anybody still wants this task: not where its client has gone or cancelled it."""
        states = ask_scheduler(self.worker, "get_task_status", keys=[self.key])
        return states.get(self.key) is not None

    def check(self) -> None:
        """Look, once a second at most, whether there is still something to wait for.

        Raises:
            CallEndedError: there is not.
        """
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        if (why := self.told().get("failed")) is not None:
            raise CallEndedError(f"not begun, for {why}")
        if not self.goes_on():
            raise CallEndedError("cancelled, or its client has gone")


@contextlib.contextmanager
def held(call: Call, place: Place) -> Iterator[TCPStore]:
    """The store, while the block runs; rank 0's Dask worker listens for it at its own address.

    The ranks are all there when the block begins.

    Raises:
        CallEndedError: another rank failed before, or the call was cancelled.
        RuntimeError: rank 0's host has no port to listen on, or cannot be reached.
    """
    listening = None
    if place.rank == 0:
        listening = network.create_listening_store(place.host, _HELD)
    if listening is not None:
        call.tell("store", [place.host, listening.port])
    host, port = _where(call)
    store = _connected(host, port, call)
    store.set(f"here/{place.rank}", "")
    _wait_for(store, "here", call, place.world_size)
    try:
        yield store
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(f"left/{place.rank}", "")
            if listening is not None:
                until = time.monotonic() + _LEAVE_S
                left = [f"left/{rank}" for rank in range(place.world_size)]
                while not store.check(left) and time.monotonic() < until:
                    time.sleep(_POLL_S)


def _where(call: Call) -> tuple[str, int]:
    while (found := call.told().get("store")) is None:
        call.check()
        time.sleep(_POLL_S)
    return found[0], int(found[1])


def _connected(host: str, port: int, call: Call) -> TCPStore:
    """In tries of a few seconds: rank 0 may have heard that the call has ended, and have left."""
    until = time.monotonic() + _CONNECT_S
    while True:
        call.check()
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TRY)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        else:
            store.set_timeout(timedelta(seconds=_CONNECT_S))
            return store


def _wait_for(store: TCPStore, what: str, call: Call, world_size: int) -> None:
    names = [f"{what}/{rank}" for rank in range(world_size)]
    while not store.check(names):
        call.check()
        time.sleep(_POLL_S)


def interface_env(host: str) -> dict[str, str]:
    """Have gloo and NCCL use the network at which this Dask worker is reached.

    Left alone, gloo takes the one that the machine's name leads to, and NCCL one of its own choice.
    """
    name = network.interface_of(host)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
