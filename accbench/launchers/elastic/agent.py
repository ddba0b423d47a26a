"""The process of one node's torch elastic agent, which the launcher starts and watches.

The agent starts workers, and restarts them when one fails or when nodes join or leave.
"""

import json
import logging
import os
import signal
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)  # fmt: skip
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from accbench.errors import LAUNCHER_PID_VARIABLE, MEETING_VARIABLE, STOPPED_STATUS
from accbench.launchers.common import failures
from accbench.launchers.elastic import watching
from accbench.recording import terminal
from accbench.system.stop_signals import StopSignals, die_with_parent

# Exit codes after which a restart would end alike: a wrong request, or a stopped worker.
_FINAL_EXIT_CODES = (2, STOPPED_STATUS)
# Seconds in which more nodes than the minimum may join before training starts without them.
_LAST_CALL_S = 10


class Agent(LocalElasticAgent):
    """torch elastic's agent, which also informs its launcher and forwards stop signals."""

    def __init__(
        self, spec: WorkerSpec, plan: dict[str, Any], folder: Path, signals: StopSignals,
        stderr: int,
    ) -> None:  # fmt: skip
        super().__init__(
            spec, DefaultLogsSpecs(log_dir=str(folder)), exit_barrier_timeout=plan["timeout_s"]
        )
        self.plan, self.folder, self.signals, self.stderr = plan, folder, signals, stderr
        self.forwarded = False
        self.first_codes: dict[int, int] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Each round of workers connects under a key of its own, or it would read old keys.
        store = worker_group.store
        assert store is not None
        if worker_group.group_rank == 0:
            store.set("meeting", uuid.uuid4().hex)
        meeting = store.get("meeting").decode()
        (self.folder / watching.MEETING_FILE).write_text(meeting)
        os.environ[MEETING_VARIABLE] = f"{self.plan['host']}:{self.plan['port']}/{meeting}"
        failures.reserve(self._error_files(worker_group).values())
        agent_stderr = os.dup(2)
        os.dup2(self.stderr, 2)  # the workers write to the terminal
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            os.dup2(agent_stderr, 2)
            os.close(agent_stderr)
        self.signals.take()  # from elastic, which would raise them in the middle of its work
        assert self._pcontext is not None
        self.first_codes = failures.keep_first_exit_codes(self._pcontext)
        pids = list(self._pcontext.pids().values())
        (self.folder / watching.PIDS_FILE).write_text(json.dumps(pids))
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        # During a new rendezvous no worker can save, so that a signal ends the launcher at once.
        pids_file = self.folder / watching.PIDS_FILE
        if self._pcontext is not None and pids_file.exists():
            failures.end_groups(self._pcontext.pids().values())  # the workers' loaders
            pids_file.unlink()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        if self.signals.graceful and not self.forwarded:
            self._remaining_restarts = 0
            failures.send(signal.SIGTERM, self._pcontext.pids().values())
            self.forwarded = True
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            codes = self.exit_codes(result)
            if set(codes.values()) <= set(_FINAL_EXIT_CODES):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                failure = failures.first_failure(codes, self._error_files(worker_group))
                num_restarts = self.plan["max_restarts"] - self._remaining_restarts + 1
                os.write(self.stderr, f"accbench: {failure.error}\n".encode())
                print(f"starting again, {num_restarts} of {self.plan['max_restarts']}", flush=True)
        return result

    def exit_codes(self, result: RunResult) -> dict[int, int]:
        """Return the exit codes of the workers that failed first, by global rank."""
        workers = self.get_worker_group().workers
        first = {workers[rank].global_rank: code for rank, code in self.first_codes.items()}
        return first or {rank: failed.exitcode for rank, failed in result.failures.items()}

    def _error_files(self, worker_group: WorkerGroup) -> dict[int, Path]:
        """Return the error file of each worker, by global rank."""
        return {
            worker.global_rank: self.folder / watching.ERROR_FILE.format(local_rank=local_rank)
            for local_rank, worker in enumerate(worker_group.workers)
        }


def main() -> None:
    """Run the agent until it ends, write the outcome, and exit.

    The arguments are a folder with the launcher's plan, and the launcher's process id.
    """
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    plan = json.loads((folder / watching.PLAN_FILE).read_text())
    with StopSignals() as signals, terminal.redirect_stderr(folder / watching.AGENT_LOG) as stderr:
        outcome, handler = _run(plan, folder, signals, stderr)
        # The launcher needs only this file, should the rest hang.
        unfinished = folder / f"{watching.OUTCOME_FILE}.new"
        unfinished.write_text(json.dumps(outcome))
        unfinished.rename(folder / watching.OUTCOME_FILE)
        if handler is not None:
            handler.shutdown()  # so that no node waits for this one
    sys.stdout.flush()
    os._exit(0)  # elastic's threads may wait for a store that is gone


def _run(
    plan: dict[str, Any], folder: Path, signals: StopSignals, stderr: int
) -> tuple[dict[str, Any], RendezvousHandler | None]:
    """Run the agent, and return how the workers ended and the rendezvous to close."""
    handler = None
    try:
        handler = _rendezvous(plan)
        spec = WorkerSpec(
            role="accbench",
            local_world_size=plan["num_workers"],
            entrypoint=sys.executable,
            args=("-u", *plan["worker"]),
            rdzv_handler=handler,
            max_restarts=plan["max_restarts"],
            monitor_interval=0.1,
            local_addr=plan["address"],
        )
        agent = Agent(spec, plan, folder, signals, stderr)
        result = agent.run()
    except RendezvousError as error:
        min_nodes, _ = plan["nodes"]
        why = (
            f"this node could not meet the others at {plan['host']}:{plan['port']} within "
            f"--timeout_s {plan['timeout_s']:g}, of --nnodes {min_nodes} at least "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        )
        return {"error": why}, handler
    if result is None:  # this node was one too many, and the others have closed the rendezvous
        (folder / watching.MEETING_FILE).unlink(missing_ok=True)
        return {"error": "the run is over: the other nodes have ended it"}, handler
    if not result.is_failed():
        return {"ok": True}, handler
    first_rank = min(worker.global_rank for worker in agent.get_worker_group().workers)
    return {"exit_codes": agent.exit_codes(result), "first_rank": first_rank}, handler


def _rendezvous(plan: dict[str, Any]) -> DynamicRendezvousHandler:
    timeout = timedelta(seconds=plan["timeout_s"])
    store = TCPStore(plan["host"], plan["port"], is_master=False, timeout=timeout)
    min_nodes, max_nodes = plan["nodes"]
    return DynamicRendezvousHandler.from_backend(
        plan["rdzv_id"], store, C10dRendezvousBackend(store, plan["rdzv_id"]), min_nodes, max_nodes,
        local_addr=plan["address"],
        timeout=RendezvousTimeout(
            join=timeout, last_call=timedelta(seconds=min(_LAST_CALL_S, plan["timeout_s"]))
        ),
    )  # fmt: skip
