"""The client's side of `--launcher dask`: starts the ranks, takes what they send, ends them."""

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
from accbench.launchers import Failure, failures
from accbench.launchers.dask import training, watch
from accbench.launchers.dask.below import Below
from accbench.launchers.dask.collecting import Collector, Files
from accbench.launchers.dask.places import Place
from accbench.launchers.dask.results import DaskResultsHandler, error_of
from accbench.stop_signals import StopSignals

_POLL_S = 0.2
# Seconds that the others have to end by themselves when one rank has failed.
_GRACE_S = 5.0
# Seconds for the last words of ranks that were told to end.
_LAST_WORDS_S = 20.0


class Received(Files):
    """What the ranks send: files of the run, their output, and how they ended."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(Below(run_dir))
        self.outcomes: dict[int, dict[str, Any]] = {}

    def take(self, source: str, message: dict[str, Any]) -> None:
        if message["kind"] == "print":
            sys.stdout.flush()
            sys.stdout.buffer.write(message["data"])
            sys.stdout.flush()
        elif message["kind"] == "outcome":
            outcome = json.loads(message["data"])
            self.outcomes[outcome["rank"]] = outcome
        else:
            super().take(source, message)


def resolved(client: Any, task: TaskConfig, place: Place) -> TaskConfig:
    """What the machine of a rank makes of a task.

    Raises:
        RequestError: it cannot run there, or there is no accbench.
    """
    if task.script is not None:
        task = dataclasses.replace(task, script=str(Path(task.script).absolute()))
    future = client.submit(
        training.resolve, task, place,
        workers=[place.address], allow_other_workers=False, pure=False,
    )  # fmt: skip
    try:
        return client.gather(future)
    except RequestError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if client.status != "running":
            raise RequestError(f"the connection to Dask's scheduler is lost: {text}") from None
        raise RequestError(
            f"{place} cannot take a task ({type(error).__name__}: {text}); the scheduler and all "
            "Dask workers need accbench in the version that is here"
        ) from None


def drive(client: Any, task: TaskConfig, worker: list[str], ranks: list[Place]) -> Failure | None:
    """Run a task's ranks to their end; none of their processes is left when this returns."""
    call_id, token = uuid.uuid4().hex, f".{uuid.uuid4().hex}.shared"
    handler = DaskResultsHandler(f"accbench-run-{call_id}")
    plan = training.Plan(
        call_id=call_id, task=json.loads((task.run_dir / config.CONFIG_FILE).read_text()),
        run_dir=str(task.run_dir), token=token,
        worker=launchers.anywhere(worker), what_runs=launchers.what_runs(),
    )  # fmt: skip
    received = Received(task.run_dir)
    (task.run_dir / token).touch()
    try:
        with StopSignals() as signals, Collector(client, handler.key, received) as collector:
            futures = _submit(client, plan, ranks, handler)
            watch.watch(client, call_id, futures)
            run = _Run(client, call_id, futures, collector, received)
            run.until_ended(signals, saves=task.save_interval > 0)
            failure = run.failure()
    finally:
        (task.run_dir / token).unlink(missing_ok=True)
    if number := signals.order or signals.wish:
        stopped = Failure("interrupted", f"stopped by {number.name}", exit_status=130)
        return stopped if failure is None or failure.status == "error" else failure
    return failure


def _submit(
    client: Any, plan: training.Plan, ranks: list[Place], handler: DaskResultsHandler
) -> dict[Any, Place]:
    futures = {}
    for place in ranks:
        key = f"accbench-rank{place.rank}-{plan.call_id}"
        future = client.submit(
            training.train, plan, place, handler, key,
            key=key, workers=[place.address], allow_other_workers=False, pure=False,
        )  # fmt: skip
        futures[future] = place
    return futures


class _Run:
    def __init__(
        self, client: Any, call_id: str, futures: Mapping[Any, Place], collector: Collector,
        received: Received,
    ) -> None:  # fmt: skip
        self.client, self.call_id, self.futures = client, call_id, futures
        self.collector, self.received = collector, received

    def until_ended(self, signals: StopSignals, saves: bool) -> None:
        """Wait for all ranks.

        Args:
            saves: whether a worker takes the first SIGTERM as a wish, saves and ends.
        """
        failed_at = None
        told: set[str] = set()
        while pending := [f for f in self.futures if not f.done()]:
            self.collector.collect(_POLL_S)
            if self.client.status != "running":
                raise ConnectionError("the scheduler has gone")
            ill = any(outcome["exit_code"] for outcome in self.received.outcomes.values())
            if ill or any(f.status in ("error", "cancelled") for f in self.futures):
                failed_at = failed_at or time.monotonic()
            late = failed_at is not None and time.monotonic() - failed_at > _GRACE_S
            if late or signals.order or (signals.wish and not saves):
                self._tell_once(training.ORDER, told)
            elif signals.wish:
                self._tell_once(training.WISH, told)
            if training.ORDER in told and self._overdue():
                self.client.cancel(pending, force=True)
        self._last_words()

    def _tell_once(self, what: str, told: set[str]) -> None:
        if what not in told:
            told.add(what)
            self._ordered_at = time.monotonic()
            watch.tell(self.client, self.call_id, "stop", what)

    def _overdue(self) -> bool:
        return time.monotonic() - self._ordered_at > _LAST_WORDS_S

    def _last_words(self) -> None:
        """Ranks whose tasks were cancelled end behind that, and say so."""
        until = time.monotonic() + _LAST_WORDS_S
        there = set(self.client.scheduler_info(n_workers=-1)["workers"])
        while time.monotonic() < until:
            cancelled = [place for f, place in self.futures.items() if f.status == "cancelled"]
            awaited = {p.rank for p in cancelled if p.address in there}
            if awaited <= self.received.outcomes.keys():
                break
            self.collector.collect(_POLL_S)
        self.collector.finish()

    def failure(self) -> Failure | None:
        """The failure that caused the others: a Dask worker's, before what ranks say of it."""
        there = set(self.client.scheduler_info(n_workers=-1)["workers"])
        for place in self.futures.values():
            if place.address not in there and place.rank not in self.received.outcomes:
                why = "was it killed, is the machine out of memory?"
                return Failure("error", f"{place} has left the cluster ({why})")
        for future, place in self.futures.items():
            if (error := error_of(future)) is not None and place.rank not in self.received.outcomes:
                text = " ".join(str(error).split())
                if type(error).__name__ == "RequestError":
                    return Failure("error", text, exit_status=2)
                if type(error).__name__ != "CallEndedError":
                    return Failure("error", f"{place}: {type(error).__name__}: {text}")
        return _of_workers(self.received.outcomes)


def _of_workers(outcomes: Mapping[int, dict[str, Any]]) -> Failure | None:
    """The first failure of the workers' processes."""
    failed = {rank: o for rank, o in sorted(outcomes.items()) if o["exit_code"]}
    # Those that were told to end did so because of the others.
    alone = {rank: o for rank, o in failed.items() if not o["ordered"]}
    codes = {rank: o["exit_code"] for rank, o in (alone or failed).items()}
    if not codes:
        return None
    with tempfile.TemporaryDirectory() as folder:
        files = {rank: Path(folder) / f"{rank}.json" for rank in outcomes}
        for rank, outcome in outcomes.items():
            if (error := outcome["error"]) is not None:
                files[rank].write_text(json.dumps(error))
        return failures.first_failure(codes, files)
