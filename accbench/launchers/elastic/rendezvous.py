"""Rendezvous of a run's nodes: one store, which the launcher of the host node holds.

torch keeps the rendezvous's store in the host node's agent, and the workers' store in the agent of
rank 0. Here one store in the host's launcher serves both: the launcher outlives its workers,
learns how the other nodes ended, and collects what they wrote.
"""

import dataclasses
import ipaddress
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from accbench.config import TaskConfig
from accbench.distributed import network
from accbench.errors import RequestError

DEFAULT_PORT = 29400
"""The default of torchrun."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address of `--rdzv_endpoint`, and whether this node hosts it."""

    host: str
    port: int
    is_host: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint(task: TaskConfig) -> Endpoint:
    """Parse `--rdzv_endpoint`; the host is node 0, or without `--node_rank` the machine it names.

    Raises:
        RequestError: it is missing, or is not HOST:PORT.
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
    host = host.strip("[]")  # of an IPv6 address
    is_host = _is_here(host) if task.node_rank is None else task.node_rank == 0
    return Endpoint(host, int(port), is_host)


def loopback_problem(endpoint: Endpoint) -> str | None:
    """Return why the other nodes cannot reach node 0; None if nothing is known to prevent it.

    Debian's /etc/hosts gives a machine's own name the address 127.0.1.1. gloo would connect node 0
    by its loopback interface then, and the others would wait for it in vain.
    """
    if not endpoint.is_host or "localhost" in endpoint.host or "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    if _is_literal(endpoint.host):
        return None
    addresses = network.addresses_of(endpoint.host)
    loopback = next((a for a in addresses if ipaddress.ip_address(a).is_loopback), None)
    if loopback is None:
        return None
    return (
        f"--rdzv_endpoint {endpoint}: on this machine {endpoint.host} is {loopback}, at which no "
        "other node reaches it (/etc/hosts says so, as Debian writes it); give the machine's "
        "address in the network instead of its name, the same on all nodes"
    )


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_here(host: str) -> bool:
    """Return whether an address is this machine's, by binding a socket to it."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def node_range(task: TaskConfig) -> tuple[int, int]:
    """Parse `--nnodes` into the minimum and the maximum number of nodes.

    Raises:
        RequestError: it is neither a number nor MIN:MAX.
    """
    parts = task.nnodes.split(":")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise RequestError(f"--nnodes {task.nnodes}: it must be a number, or MIN:MAX as 1:4")
    min_nodes, max_nodes = int(parts[0]), int(parts[-1])
    if min_nodes > max_nodes:
        raise RequestError(f"--nnodes {task.nnodes}: the minimum comes first, as in 1:4")
    return min_nodes, max_nodes


def open_store(endpoint: Endpoint, task: TaskConfig) -> Store:
    """Open the store on the host, or connect to it, within `--timeout_s`.

    Raises:
        RequestError: the host cannot be reached, or its port is taken.
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
            f"it, and check that this machine can reach it ({reason})"
        ) from None
    return PrefixStore(f"accbench/{task.rdzv_id}", store)


def is_reachable(endpoint: Endpoint) -> bool:
    """Return whether the host accepts a connection within two seconds."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=2):
            return True
    except OSError:
        return False


def publish(store: Store, key: str, value: Any) -> None:
    """Set a key to a value, encoded as JSON."""
    store.set(key, json.dumps(value))


def get_published(store: Store, key: str) -> Any:
    """Wait for a key for as long as the store's timeout, and return its value."""
    return json.loads(store.get(key))


def wait_for_published(store: Store, keys: list[str], seconds: float) -> dict[str, Any]:
    """Wait for several keys for up to `seconds`, and return those that are set."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {key: get_published(store, key) for key in keys if store.check([key])}


def wait_for_next_run(endpoint: Endpoint, task: TaskConfig, last: str | None) -> tuple[Store, Any]:
    """Wait for node 0's next run, up to `--timeout_s`, and return its store and description.

    Args:
        endpoint: the rendezvous.
        task: this node's task.
        last: id of the run in which this node last took part, whose store may still exist.

    Raises:
        RequestError: node 0 began no other run.
    """
    deadline = time.monotonic() + task.timeout_s
    while time.monotonic() < deadline:
        store = open_store(endpoint, task)
        try:
            run = get_published(store, "run")
        except RuntimeError:  # the store of the previous run, which has just closed
            continue
        if run["id"] != last:
            return store, run
        del store
        time.sleep(0.2)
    raise RequestError(
        f"node 0 at --rdzv_endpoint {endpoint} began no other run within --timeout_s "
        f"{task.timeout_s:g}"
    )


def local_address(endpoint: Endpoint) -> str:
    """Return this machine's address, as the other nodes see it."""
    return endpoint.host if endpoint.is_host else network.address_towards(endpoint.host)


def node_name(endpoint: Endpoint) -> str:
    """Return this machine's name and its address towards the endpoint."""
    return f"{socket.gethostname()} ({local_address(endpoint)})"
