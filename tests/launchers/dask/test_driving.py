"""The client's side of a run, with a cluster that is not there."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from accbench import config
from accbench.errors import RequestError
from accbench.launchers.dask import driving, event_log, rendezvous, training
from accbench.launchers.dask.rank_assignment import RankAssignment

RANK = RankAssignment(0, "tcp://127.0.0.1:1", "127.0.0.1", 0, 1, 1)


class Never:
    """Stands in for the future of a task whose Dask worker is killed."""

    status = "pending"

    def result(self, timeout: float | None = None) -> Any:
        if timeout is None:
            pytest.fail("waits for ever")
        raise asyncio.TimeoutError


class EndsWhenTold:
    """Stands in for the future of a rank that ends when it is told to."""

    status = "finished"

    def __init__(self, client: "Client") -> None:
        self.client = client

    def done(self) -> bool:
        return "stop" in self.client.metadata


class Client:
    """Stands in for Dask's client."""

    status = "running"

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.metadata: dict[str, Any] = {}
        self.scheduler = SimpleNamespace(identity=None)

    def submit(self, *_, **__) -> Never:
        return Never()

    def gather(self, future: Never) -> Any:
        return future.result()

    def sync(self, _) -> dict[str, Any]:
        return {"workers": dict.fromkeys(self.addresses, {})}

    def set_metadata(self, keys: list[str], value: Any) -> None:
        self.metadata[keys[-1]] = value


def test_the_client_does_not_wait_for_a_dask_worker_that_is_lost():
    with pytest.raises(RequestError, match="rank 0's Dask worker tcp://127.0.0.1:1 has left"):
        driving.resolve_on_worker(Client("tcp://127.0.0.1:2"), config.parse([]), RANK)


@pytest.mark.parametrize(("outcome", "begins"), [
    ({"exit_code": 0, "ordered": False}, "cannot write into "),
    ({"exit_code": -15, "ordered": True}, "cannot write into "),
    ({"exit_code": 3, "ordered": False}, "rank 0 exited with status 3, see above; cannot write in"),
])  # fmt: skip
def test_a_file_that_the_client_cannot_write_ends_the_run(tmp_path, outcome, begins):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    client, receiver = Client(RANK.address), driving.RunReceiver(tmp_path)

    def collect(seconds: float) -> None:
        message = {"kind": "append", "path": "checkpoints/file", "data": b"text"}
        receiver.handle("source", message)
        receiver.outcomes[0] = {"rank": 0, "error": None, **outcome}

    collector: Any = SimpleNamespace(collect=collect, finish=lambda: None)
    futures: Any = {EndsWhenTold(client): RANK}
    monitor = driving._RunMonitor(client, "call", futures, collector, receiver)
    signals: Any = SimpleNamespace(graceful=None, forced=None)
    monitor.wait(signals, saves=True)
    assert client.metadata["stop"] == training.STOP_NOW
    failure = monitor.failure()
    assert failure.status == "error"
    assert failure.error.startswith(begins)
    assert "'checkpoints/file'" in failure.error


def test_a_rank_that_sends_hears_a_stop(monkeypatch):
    """Though the client takes nothing, for which it waits for minutes."""
    monkeypatch.setattr(event_log, "_current_worker", lambda: SimpleNamespace(address="here"))
    monkeypatch.setattr(event_log, "call_scheduler", lambda *_, **__: 0)
    monkeypatch.setattr(event_log, "_AHEAD_EVENTS", 1)
    monkeypatch.setattr(event_log, "STALL_TIMEOUT_S", 20.0)
    monkeypatch.setattr(training, "_GRACE_S", 0.1)
    call: Any = SimpleNamespace(
        is_wanted=lambda: True, metadata=lambda: {"stop": training.STOP_NOW}
    )
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        sender = event_log.EventSender("key")
        stop_requests = training._StopRequests(process, call)
        sender.check = stop_requests.forward
        with pytest.raises(rendezvous.CallEndedError, match="told to stop"):
            sender.send("whole", "path", bytes(2 * event_log.PART_BYTES))
    assert process.returncode < 0
    assert stop_requests.received == {training.STOP_NOW}
