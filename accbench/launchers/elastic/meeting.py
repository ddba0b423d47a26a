"""Where the nodes of a run meet: one store, which the launcher of one of them holds.

torch's own store of a rendezvous lives in the agent of the node that hosts it, and the
workers' in the agent of rank 0; here both are one, in the host's launcher, which outlives its
workers, hears how the other nodes ended, and gathers what they wrote.
"""

import dataclasses
import json
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from accbench import network
from accbench.config import TaskConfig
from accbench.errors import RequestError

DEFAULT_PORT = 29400
"""torchrun's."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """`--rdzv_endpoint`, and which side of it this node is."""

    host: str
    port: int
    is_host: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def endpoint_of(task: TaskConfig) -> Endpoint:
    """Where to meet; node 0 is the host, or else the machine whose address it is.

    Raises:
        RequestError: it is missing, or no HOST:PORT.
    """
    if task.rdzv_endpoint is None:
        raise RequestError(
            f"--nnodes {task.nnodes} needs --rdzv_endpoint HOST:PORT, the same on all nodes: "
            "an address of node 0, at which the others reach it"
        )
    host, _, port = task.rdzv_endpoint.strip().rpartition(":")
    if not host:
        host, port = port, str(DEFAULT_PORT)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"--rdzv_endpoint {task.rdzv_endpoint}: it must be HOST:PORT")
    is_host = _is_here(host) if task.node_rank is None else task.node_rank == 0
    return Endpoint(host.strip("[]"), int(port), is_host)


def _is_here(host: str) -> bool:
    """Whether an address is of this machine: one can be bound where it is."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def nodes_of(task: TaskConfig) -> tuple[int, int]:
    """`--nnodes` as the fewest and the most.

    Raises:
        RequestError: it is neither a number nor MIN:MAX.
    """
    parts = task.nnodes.split(":")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise RequestError(f"--nnodes {task.nnodes}: it must be a number, or MIN:MAX as 1:4")
    fewest, most = int(parts[0]), int(parts[-1])
    if fewest > most:
        raise RequestError(f"--nnodes {task.nnodes}: the fewest come first, as in 1:4")
    return fewest, most


def open_store(endpoint: Endpoint, task: TaskConfig) -> Store:
    """The host's store, or a connection to it, within `--timeout_s`.

    Raises:
        RequestError: nobody is there, or the port is taken.
    """
    timeout = timedelta(seconds=task.timeout_s)
    try:
        store = TCPStore(
            endpoint.host, endpoint.port, is_master=endpoint.is_host, wait_for_workers=False,
            timeout=timeout,
        )  # fmt: skip
    except (DistError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if endpoint.is_host:
            raise RequestError(
                f"--rdzv_endpoint {endpoint}: cannot listen there ({reason}); choose another port, "
                "or end what uses it"
            ) from None
        raise RequestError(
            f"no node 0 at --rdzv_endpoint {endpoint} within --timeout_s {task.timeout_s:g}: start "
            f"it, and see that this machine reaches it ({reason})"
        ) from None
    return PrefixStore(f"accbench/{task.rdzv_id}", store)


def reachable(endpoint: Endpoint) -> bool:
    """Whether the host answers, within two seconds."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=2):
            return True
    except OSError:
        return False


def publish(store: Store, key: str, value: Any) -> None:
    """Set a key to a value that JSON can hold."""
    store.set(key, json.dumps(value))


def published(store: Store, key: str) -> Any:
    """A key's value, waited for as long as the store waits."""
    return json.loads(store.get(key))


def published_soon(store: Store, keys: list[str], seconds: float) -> dict[str, Any]:
    """Those of the keys that are there within so many seconds."""
    until = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.05)
    return {key: published(store, key) for key in keys if store.check([key])}


def next_run(endpoint: Endpoint, task: TaskConfig, last: str | None) -> tuple[Store, Any]:
    """What node 0 runs next, and the store of it, within `--timeout_s`.

    Args:
        last: the run that this node has taken part in, whose store may still be there.

    Raises:
        RequestError: nothing is begun.
    """
    until = time.monotonic() + task.timeout_s
    while time.monotonic() < until:
        store = open_store(endpoint, task)
        try:
            told = published(store, "run")
        except RuntimeError:  # the store of the run before, which went at that moment
            continue
        if told["id"] != last:
            return store, told
        del store
        time.sleep(0.2)
    raise RequestError(
        f"node 0 at --rdzv_endpoint {endpoint} began no other run within --timeout_s "
        f"{task.timeout_s:g}"
    )


def local_address(endpoint: Endpoint) -> str:
    """This machine's address, as the other nodes see it."""
    return endpoint.host if endpoint.is_host else network.address_towards(endpoint.host)


def name_of_node(endpoint: Endpoint) -> str:
    """This machine's name and its address there."""
    return f"{socket.gethostname()} ({local_address(endpoint)})"
