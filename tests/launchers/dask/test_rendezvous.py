"""Rendezvous of a call's ranks."""

import socket
import time
from typing import Any

import pytest

from accbench.launchers.dask import rendezvous
from accbench.launchers.dask.rank_assignment import RankAssignment


class Cancelled:
    """Stands in for a call that was cancelled after rank 0 had told its store, and had left."""

    def __init__(self, host: str, port: int) -> None:
        self.store = [host, port]
        self.until = time.monotonic() + 1

    def metadata(self) -> dict[str, Any]:
        return {"store": self.store}

    def raise_if_ended(self) -> None:
        if time.monotonic() > self.until:
            raise rendezvous.CallEndedError("cancelled, or its client has gone")


def test_a_rank_that_comes_when_rank_0_has_left_does_not_wait():
    """torch's store would be tried for 300 s, and the next call wait as long."""
    with socket.socket() as bound:  # and not listened on
        bound.bind(("127.0.0.1", 0))
        call = Cancelled(*bound.getsockname())
        place = RankAssignment(1, "tcp://127.0.0.1:1", "127.0.0.1", 1, 2, 2)
        began = time.monotonic()
        with pytest.raises(rendezvous.CallEndedError), rendezvous.rendezvous_store(call, place):
            pytest.fail("nobody was there to meet")
    assert time.monotonic() - began < 60
