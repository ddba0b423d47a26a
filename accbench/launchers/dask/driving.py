"""The client's side of `--launcher dask`: starts the ranks, receives their messages, ends them."""

import asyncio
import dataclasses
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accbench import config, launchers
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.common import failures
from accbench.launchers.dask import training, watch
from accbench.launchers.dask.collecting import Collector, FileWriter
from accbench.launchers.dask.rank_assignment import RankAssignment, dask_workers
from accbench.launchers.dask.results import DaskResultsHandler, error_of
from accbench.launchers.dask.safe_folder import SafeFolder
from accbench.system.stop_signals import StopSignals

_POLL_S = 0.2
# Seconds between checks whether the Dask worker that resolves a task is still in the cluster.
_CHECK_S = 1.0
# Seconds in which the other ranks may end by themselves after one has failed.
_GRACE_S = 5.0
# Seconds to wait for the last messages of ranks that were told to end.
_LAST_MESSAGES_S = 20.0


class RunReceiver(FileWriter):
    """A handler of the ranks' messages: the run's files, output, and how each rank ended."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(SafeFolder(run_dir))
        self.outcomes: dict[int, dict[str, Any]] = {}

    def handle(self, source: str, message: dict[str, Any]) -> None:
        if message["kind"] == "print":
            sys.stdout.flush()
            sys.stdout.buffer.write(message["data"])
            sys.stdout.flush()
        elif message["kind"] == "outcome":
            outcome = json.loads(message["data"])
            self.outcomes[outcome["rank"]] = outcome
        elif not (self.refused and message["path"] == config.RECORDS_FILE):
            # After a refusal a rank that was told to stop would record that all is saved.
            super().handle(source, message)


def resolve_on_worker(client: Any, task: TaskConfig, assignment: RankAssignment) -> TaskConfig:
    """Resolve a task on the machine of a rank.

    Raises:
        RequestError: the task cannot run there, or accbench is not installed there.
    """
    if task.script is not None:
        task = dataclasses.replace(task, script=str(Path(task.script).absolute()))
    future = client.submit(
        training.resolve, task, assignment,
        workers=[assignment.address], allow_other_workers=False, pure=False,
    )  # fmt: skip
    try:
        return _result(client, future, assignment)
    except RequestError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if client.status != "running":
            raise RequestError(f"the connection to Dask's scheduler is lost: {text}") from None
        raise RequestError(
            f"{assignment} cannot take a task ({type(error).__name__}: {text}); the scheduler "
            "and all Dask workers need the client's version of accbench"
        ) from None


def _result(client: Any, future: Any, assignment: RankAssignment) -> Any:
    """Wait for a task that may only run on one Dask worker, and return its result.

    Raises:
        RequestError: the Dask worker has left the cluster; Dask would wait for it for ever.
    """
    while True:
        try:
            return future.result(timeout=_CHECK_S)
        except asyncio.TimeoutError:
            if future.status == "error":  # the task's own
                raise
        if assignment.address not in dask_workers(client):
            raise RequestError(
                f"{assignment} has left the cluster (was it killed, is the machine out of memory?)"
            )


def drive(
    client: Any, task: TaskConfig, worker: list[str], ranks: list[RankAssignment]
) -> Failure | None:
    """Run a task's ranks until all have ended; none of their processes is left afterwards."""
    call_id, token = uuid.uuid4().hex, f".{uuid.uuid4().hex}.shared"
    handler = DaskResultsHandler(f"accbench-run-{call_id}")
    request = training.RunRequest(
        call_id=call_id, task=json.loads((task.run_dir / config.CONFIG_FILE).read_text()),
        run_dir=str(task.run_dir), token=token,
        worker=launchers.anywhere(worker), versions=launchers.what_runs(),
    )  # fmt: skip
    receiver = RunReceiver(task.run_dir)
    (task.run_dir / token).touch()
    try:
        with StopSignals() as signals, Collector(client, handler.key, receiver) as collector:
            futures = _submit(client, request, ranks, handler)
            watch.watch(client, call_id, futures)
            run = _RunMonitor(client, call_id, futures, collector, receiver)
            run.wait(signals, saves=task.save_interval > 0)
            failure = run.failure()
    finally:
        (task.run_dir / token).unlink(missing_ok=True)
    number = signals.forced or signals.graceful
    if number and not receiver.refused:  # what was told to stop and could not save, has failed
        stopped = Failure("interrupted", f"stopped by {number.name}", exit_status=130)
        return stopped if failure is None or failure.status == "error" else failure
    return failure


def _submit(
    client: Any,
    request: training.RunRequest,
    ranks: list[RankAssignment],
    handler: DaskResultsHandler,
) -> dict[Any, RankAssignment]:
    futures = {}
    for assignment in ranks:
        key = f"accbench-rank{assignment.rank}-{request.call_id}"
        future = client.submit(
            training.train, request, assignment, handler, key,
            key=key, workers=[assignment.address], allow_other_workers=False, pure=False,
        )  # fmt: skip
        futures[future] = assignment
    return futures


class _RunMonitor:
    """The client's view of a run on the cluster."""

    def __init__(
        self, client: Any, call_id: str, futures: Mapping[Any, RankAssignment],
        collector: Collector, receiver: RunReceiver,
    ) -> None:  # fmt: skip
        self.client, self.call_id, self.futures = client, call_id, futures
        self.collector, self.receiver = collector, receiver

    def wait(self, signals: StopSignals, saves: bool) -> None:
        """Wait until all ranks have ended; on a failure or a signal, tell them to stop.

        The first file that cannot be written here ends them too: what follows would be lost.

        Args:
            signals: stop signals to this process.
            saves: whether a worker that receives a first SIGTERM saves a checkpoint and ends.
        """
        failed_at = None
        requested: set[str] = set()
        while pending := [f for f in self.futures if not f.done()]:
            self.collector.collect(_POLL_S)
            if self.client.status != "running":
                raise ConnectionError("the connection to the scheduler is lost")
            has_failed = any(outcome["exit_code"] for outcome in self.receiver.outcomes.values())
            if has_failed or any(f.status in ("error", "cancelled") for f in self.futures):
                failed_at = failed_at or time.monotonic()
            is_overdue = failed_at is not None and time.monotonic() - failed_at > _GRACE_S
            is_ended = is_overdue or signals.forced or self.receiver.refused
            if is_ended or (signals.graceful and not saves):
                self._request_stop(training.STOP_NOW, requested)
            elif signals.graceful:
                self._request_stop(training.SAVE_AND_STOP, requested)
            if training.STOP_NOW in requested and self._is_overdue():
                self.client.cancel(pending, force=True)
        self._collect_last_messages()

    def _request_stop(self, how: str, requested: set[str]) -> None:
        if how not in requested:
            requested.add(how)
            self._requested_at = time.monotonic()
            watch.set_call_metadata(self.client, self.call_id, "stop", how)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._requested_at > _LAST_MESSAGES_S

    def _collect_last_messages(self) -> None:
        """Handle the ranks' last messages; ranks end some time after their tasks are cancelled."""
        deadline = time.monotonic() + _LAST_MESSAGES_S
        present = set(dask_workers(self.client))
        while time.monotonic() < deadline:
            cancelled = [
                assignment for f, assignment in self.futures.items() if f.status == "cancelled"
            ]
            awaited = {p.rank for p in cancelled if p.address in present}
            if awaited <= self.receiver.outcomes.keys():
                break
            self.collector.collect(_POLL_S)
        self.collector.finish()

    def failure(self) -> Failure | None:
        """Return the failure that caused the others, with a file that could not be written here."""
        failure = self._failure_of_ranks()
        if not self.receiver.refused:
            return failure
        why = f"cannot write into {self.receiver.folder.folder}: {self.receiver.refused[0]}"
        failed = [o for o in self.receiver.outcomes.values() if o["exit_code"]]
        were_told = bool(failed) and all(outcome["ordered"] for outcome in failed)
        if failure is None or failure.status == "interrupted" or were_told:
            return Failure("error", why)
        return dataclasses.replace(failure, error=f"{failure.error}; {why}")

    def _failure_of_ranks(self) -> Failure | None:
        """Return the failure that came first; a lost Dask worker comes before errors."""
        present = set(dask_workers(self.client))
        for assignment in self.futures.values():
            if assignment.address not in present and assignment.rank not in self.receiver.outcomes:
                why = "was it killed, is the machine out of memory?"
                return Failure("error", f"{assignment} has left the cluster ({why})")
        for future, assignment in self.futures.items():
            if (
                error := error_of(future)
            ) is not None and assignment.rank not in self.receiver.outcomes:
                text = " ".join(str(error).split())
                if type(error).__name__ == "RequestError":
                    return Failure("error", text, exit_status=2)
                if type(error).__name__ != "CallEndedError":
                    return Failure("error", f"{assignment}: {type(error).__name__}: {text}")
        return _first_worker_failure(self.receiver.outcomes)


def _first_worker_failure(outcomes: Mapping[int, dict[str, Any]]) -> Failure | None:
    """Return the failure of the workers' processes that came first."""
    failed = {rank: o for rank, o in sorted(outcomes.items()) if o["exit_code"]}
    # Ranks that were told to stop ended because of the others.
    unprompted = {rank: o for rank, o in failed.items() if not o["ordered"]}
    codes = {rank: o["exit_code"] for rank, o in (unprompted or failed).items()}
    if not codes:
        return None
    with tempfile.TemporaryDirectory() as folder:
        files = {rank: Path(folder) / f"{rank}.json" for rank in outcomes}
        for rank, outcome in outcomes.items():
            if (error := outcome["error"]) is not None:
                files[rank].write_text(json.dumps(error))
        return failures.first_failure(codes, files)
