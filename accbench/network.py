"""This machine's own addresses and network interfaces."""

import socket
import struct

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


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


def interface_of(address: str) -> str | None:
    """The network interface with an IPv4 address, by which gloo wants to be told; or None."""
    try:
        import fcntl

        wanted = socket.inet_aton(socket.gethostbyname(address))
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # it has none
                continue
            # All of 127.0.0.0/8 is the loopback's.
            if found == wanted or (name == "lo" and wanted[:1] == b"\x7f"):
                return name
    return None


def loopback_socket() -> socket.socket:
    """Listens at a free port of the loopback; torch's store by itself listens at all addresses."""
    return socket.create_server((LOOPBACK, 0), backlog=1024)
