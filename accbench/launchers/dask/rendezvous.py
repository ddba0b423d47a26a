"""Rendezvous of a call's ranks: a TCPStore that rank 0's Dask worker hosts on a free port."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from accbench.distributed import network
from accbench.launchers.dask.rank_assignment import RankAssignment, call_scheduler, metadata_key

# Seconds between checks whether the other ranks have come, and whether the call has ended.
_POLL_S, _CHECK_S = 0.02, 1.0
# Seconds that rank 0 keeps the store for ranks that are still leaving.
_LEAVE_S = 5.0
# Timeouts for reaching the store in all, and for each attempt.
_CONNECT_S, _ATTEMPT = 300.0, timedelta(seconds=3)
# The store's own timeout, which never applies: the call decides how long to wait.
_STORE_TIMEOUT = timedelta(hours=24)


class CallEndedError(RuntimeError):
    """This rank's call was cancelled, or another rank of it has failed."""


class RankCall:
    """The state of a call, as one of its ranks reads it in a task on a Dask worker.

    Args:
        call_id: names the call.
        key: key of this rank's task.
        worker: the Dask worker that runs the task.
    """

    def __init__(self, call_id: str, key: Any, worker: Any) -> None:
        self.call_id, self.key, self.worker = call_id, key, worker
        self._checked_at = 0.0

    def metadata(self) -> dict[str, Any]:
        """Return the call's shared values: rank 0's `store`, the client's `failed` and `stop`."""
        keys = metadata_key(self.call_id)
        return call_scheduler(self.worker, "get_metadata", keys=keys, default=None) or {}

    def set_metadata(self, name: str, value: Any) -> None:
        """Set a value that all ranks of the call can read."""
        keys = [*metadata_key(self.call_id), name]
        call_scheduler(self.worker, "set_metadata", keys=keys, value=value)

    def is_wanted(self) -> bool:
        """Return whether the task's client is still there and has not cancelled it."""
        states = call_scheduler(self.worker, "get_task_status", keys=[self.key])
        return states.get(self.key) is not None

    def raise_if_ended(self) -> None:
        """Raise an error if the call has ended; asks the scheduler at most once a second.

        Raises:
            CallEndedError: the call has ended.
        """
        if time.monotonic() - self._checked_at < _CHECK_S:
            return
        self._checked_at = time.monotonic()
        if (why := self.metadata().get("failed")) is not None:
            raise CallEndedError(f"not begun, because {why}")
        if not self.is_wanted():
            raise CallEndedError("cancelled, or its client has gone")


@contextlib.contextmanager
def rendezvous_store(call: RankCall, assignment: RankAssignment) -> Iterator[TCPStore]:
    """Yield the call's store, which rank 0's Dask worker hosts at its own address.

    All ranks have connected when the block begins.

    Raises:
        CallEndedError: another rank failed before, or the call was cancelled.
        RuntimeError: rank 0's host has no free port, or cannot be reached.
    """
    hosted_store = None
    if assignment.rank == 0:
        hosted_store = network.create_listening_store(assignment.host, _STORE_TIMEOUT)
    if hosted_store is not None:
        call.set_metadata("store", [assignment.host, hosted_store.port])
    host, port = _await_store_address(call)
    store = _connect(host, port, call)
    store.set(f"here/{assignment.rank}", "")
    _wait_for_ranks(store, "here", call, assignment.world_size)
    try:
        yield store
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(f"left/{assignment.rank}", "")
            if hosted_store is not None:
                deadline = time.monotonic() + _LEAVE_S
                left = [f"left/{rank}" for rank in range(assignment.world_size)]
                while not store.check(left) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)


def _await_store_address(call: RankCall) -> tuple[str, int]:
    while (address := call.metadata().get("store")) is None:
        call.raise_if_ended()
        time.sleep(_POLL_S)
    return address[0], int(address[1])


def _connect(host: str, port: int, call: RankCall) -> TCPStore:
    """Connect to the store in attempts of a few seconds.

    Rank 0 may already have left, if it has learnt that the call has ended.
    """
    deadline = time.monotonic() + _CONNECT_S
    while True:
        call.raise_if_ended()
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_ATTEMPT)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timedelta(seconds=_CONNECT_S))
            return store


def _wait_for_ranks(store: TCPStore, prefix: str, call: RankCall, world_size: int) -> None:
    names = [f"{prefix}/{rank}" for rank in range(world_size)]
    while not store.check(names):
        call.raise_if_ended()
        time.sleep(_POLL_S)


def interface_env(host: str) -> dict[str, str]:
    """Return variables that bind gloo and NCCL to the network interface of this Dask worker.

    By default gloo uses the interface of the host name's address, and NCCL chooses one itself.
    """
    name = network.interface_of(host)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
