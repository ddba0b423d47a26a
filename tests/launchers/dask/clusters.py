"""Real Dask clusters on this machine, of two workers in processes of their own.

As a program, one on TLS: it takes a folder, leaves there what a client needs, and ends when its
standard input does.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from distributed import Client, LocalCluster
from distributed.security import Security

_DASHBOARD = "127.0.0.1:0"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Client]:
    """A client of a cluster in the clear, which ends with the block."""
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": _DASHBOARD}
    with (
        mock.patch.dict(os.environ),  # where Dask sets what its workers are to have
        LocalCluster(local_directory=str(folder), silence_logs=logging.CRITICAL, **options) as made,
        Client(made, set_as_default=False) as client,
    ):
        yield client


def main(folder: Path) -> None:
    """Serve a cluster on TLS until standard input ends."""
    security = Security.temporary()
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=_DASHBOARD, protocol="tls://",
        security=security, local_directory=str(folder), silence_logs=logging.CRITICAL,
    ) as made:  # fmt: skip
        (folder / "ca.pem").write_text(security.tls_ca_file)
        (folder / "cert.pem").write_text(security.tls_client_cert)
        (folder / "key.pem").write_text(security.tls_client_key)
        (folder / "address.new").write_text(made.scheduler_address)
        (folder / "address.new").rename(folder / "address")
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
