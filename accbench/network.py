"""This machine's own addresses and network interfaces, and where its processes meet."""

import contextlib
import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """This machine's address on the way to another; nothing is sent to learn it.

    Raises:
        OSError: there is no way, or no such host.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # any port will do
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str | None:
    """The network interface with this address; None if there is none."""
    addresses = {host}
    with contextlib.suppress(OSError):
        addresses |= {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    if any(address.startswith("127.") for address in addresses):
        addresses.add(LOOPBACK)  # all of 127.0.0.0/8 is the loopback's
    interfaces = importlib.import_module("psutil").net_if_addrs()  # its types are not told
    for name, its_own in interfaces.items():
        if any(own.address in addresses for own in its_own):
            return str(name)
    return None


def address_of(interface: str) -> str | None:
    """The address that a network interface has, by IPv4 where it has one; None if there is none."""
    own = importlib.import_module("psutil").net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in own:
            if found.family == family:
                return str(found.address)
    return None


def listening_store(host: str, timeout: timedelta, told: str | None = None) -> "TCPStore":
    """torch's store at a free port of an address; by itself it listens at all of them.

    Args:
        host: to listen at; empty for all addresses.
        told: as others know it; `host` if None.

    Raises:
        OSError: this machine has no such address, or no free port there.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, 0), family=family, backlog=1024)
    return TCPStore(
        told or host, bound.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=bound.detach(), timeout=timeout,
    )  # fmt: skip
