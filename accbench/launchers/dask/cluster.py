"""The connection to a Dask cluster, which must be encrypted beyond this machine."""

import ipaddress
import json
import os
from pathlib import Path
from typing import Any

from accbench.errors import RequestError

_CONNECT_S = 30.0
_TLS_ADVICE = (
    "start the scheduler and its workers with --tls-ca-file, --tls-cert and --tls-key, and name it "
    "by tls://HOST:PORT"
)


def connect(options: Any) -> Any:
    """Connect to the cluster that the launcher's options name, and return a client.

    Raises:
        RequestError: no scheduler answers, or the connection would not be secure.
    """
    from distributed import Client
    from distributed.security import Security

    address = address_of(options)
    if (problem := security_problem(address)) is not None:
        raise RequestError(problem)
    tls_options = {
        "tls_ca_file": options.tls_ca_file, "tls_client_cert": options.tls_cert,
        "tls_client_key": options.tls_key,
    }  # fmt: skip
    for path in filter(None, tls_options.values()):
        if not os.access(path, os.R_OK):
            raise RequestError(f"cannot read {path}, which Dask's TLS needs")
    encrypted = address.startswith("tls://") or None
    try:
        # Dask's own configuration fills in options that are not set here.
        chosen = {name: value for name, value in tls_options.items() if value is not None}
        security = Security(require_encryption=encrypted, **chosen)
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
    """Return the scheduler's address from the options or from the scheduler's file.

    Raises:
        RequestError: the file cannot be read.
    """
    if options.scheduler is not None:
        return with_protocol(options.scheduler)
    try:
        return with_protocol(json.loads(Path(options.scheduler_file).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"--scheduler_file {options.scheduler_file}: it is not a file of a Dask scheduler "
            f"({getattr(error, 'strerror', None) or type(error).__name__})"
        ) from None


def with_protocol(address: str) -> str:
    """Add the protocol to an address that lacks it: tcp, unencrypted, as Dask assumes."""
    return address if "://" in address else f"tcp://{address}"


def security_problem(address: str) -> str | None:
    """Return why an address must not be used; None if it may be.

    Anyone who reaches an unencrypted scheduler or worker can run code there.
    """
    protocol, _, rest = address.partition("://")
    host = rest.rsplit(":", 1)[0].strip("[]")
    if protocol in ("tls", "wss") or _is_loopback(host):
        return None
    return f"--scheduler {address}: beyond this machine Dask has to be on TLS; {_TLS_ADVICE}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
