"""This machine's addresses and network interfaces, and torch's rendezvous store."""

import contextlib
import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """Return this machine's address on the route to another; nothing is sent to learn it.

    Raises:
        OSError: there is no route, or no such host.
    """
    candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # any port will do
    family, kind, protocol, _, address = candidates[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def addresses_of(host: str) -> set[str]:
    """Return the addresses of a host as this machine knows them; empty if it knows none."""
    with contextlib.suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    return set()


def interface_of(host: str) -> str | None:
    """Return the network interface with this address; None if there is none."""
    addresses = {host} | addresses_of(host)
    if any(address.startswith("127.") for address in addresses):
        addresses.add(LOOPBACK)  # all of 127.0.0.0/8 is the loopback's
    interfaces = importlib.import_module("psutil").net_if_addrs()  # it ships no types
    for name, interface_addresses in interfaces.items():
        if any(candidate.address in addresses for candidate in interface_addresses):
            return str(name)
    return None


def address_of(interface: str) -> str | None:
    """Return a network interface's address, IPv4 if it has one; None if it has no address."""
    candidates = importlib.import_module("psutil").net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for candidate in candidates:
            if candidate.family == family:
                return str(candidate.address)
    return None


def create_listening_store(
    host: str, timeout: timedelta, advertised_host: str | None = None
) -> "TCPStore":
    """Create a torch TCPStore that listens at a free port of one address.

    A store that torch creates listens at all addresses.

    Args:
        host: address to listen at; empty for all addresses.
        timeout: how long the store's clients wait for a key.
        advertised_host: host name or address that others connect to; `host` if None.

    Raises:
        OSError: this machine has no such address, or no free port there.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    return TCPStore(
        advertised_host or host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(), timeout=timeout,
    )  # fmt: skip
