"""The way to a Dask cluster, which is encrypted where it leaves this machine."""

import ipaddress
import json
import os
from pathlib import Path
from typing import Any

from accbench.errors import RequestError

_CONNECT_S = 30.0
_HOW = (
    "start the scheduler and its workers with --tls-ca-file, --tls-cert and --tls-key, and name it "
    "by tls://HOST:PORT"
)


def connect(options: Any) -> Any:
    """A client of the cluster that the launcher's options name.

    Raises:
        RequestError: there is none, or it must not be used.
    """
    from distributed import Client
    from distributed.security import Security

    address = address_of(options)
    if (problem := insecure(address)) is not None:
        raise RequestError(problem)
    given = {
        "tls_ca_file": options.tls_ca_file, "tls_client_cert": options.tls_cert,
        "tls_client_key": options.tls_key,
    }  # fmt: skip
    for path in filter(None, given.values()):
        if not os.access(path, os.R_OK):
            raise RequestError(f"cannot read {path}, which Dask's TLS is to use")
    encrypted = address.startswith("tls://") or None
    try:
        # What is not given is as Dask's own configuration has it.
        security = Security(
            require_encryption=encrypted, **{name: v for name, v in given.items() if v is not None}
        )
        return Client(
            address, security=security, timeout=_CONNECT_S, set_as_default=False,
            name="accbench",
        )  # fmt: skip
    except (OSError, TypeError, ValueError) as error:
        raise RequestError(
            f"no Dask scheduler at {address} within {_CONNECT_S:g} s: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def address_of(options: Any) -> str:
    """The scheduler's address, as the options or its file have it.

    Raises:
        RequestError: the file cannot be read.
    """
    if options.scheduler is not None:
        return with_protocol(options.scheduler)
    try:
        return with_protocol(json.loads(Path(options.scheduler_file).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"--scheduler_file {options.scheduler_file}: it is no file of a Dask scheduler's "
            f"({getattr(error, 'strerror', None) or type(error).__name__})"
        ) from None


def with_protocol(address: str) -> str:
    """Dask's own reading of an address without a protocol: TCP in the clear."""
    return address if "://" in address else f"tcp://{address}"


def insecure(address: str) -> str | None:
    """Why an address must not be used; None if it may be.

    Whoever reaches a scheduler or a worker in the clear can run code there.
    """
    protocol, _, rest = address.partition("://")
    host = rest.rsplit(":", 1)[0].strip("[]")
    if protocol in ("tls", "wss") or _is_loopback(host):
        return None
    return f"--scheduler {address}: beyond this machine Dask has to be on TLS; {_HOW}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
