"""Workers on several machines, through torch elastic's agent: one launcher per node.

Every node runs the same command, one of them with `--node_rank 0`, as with torchrun. That node
creates the run's folder and keeps its record; the others take the task from it, so that all train
alike.

torch elastic's agent runs in a process of its own. Whenever it checks its workers it also reads
the rendezvous's store. If the connection is cut it waits there for ever and handles no signal, so
that the launcher watches the agent and kills it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from accbench import config, launchers, resolving
from accbench.config import TaskConfig
from accbench.distributed import network
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    RECORDS_BEFORE_VARIABLE,
    NoMoreRunsError,
    RequestError,
)  # fmt: skip
from accbench.launchers import Failure, Joined
from accbench.launchers.common import failures
from accbench.launchers.elastic import node_reports, rendezvous, watching
from accbench.launchers.elastic.rendezvous import Endpoint
from accbench.recording import terminal
from accbench.system import cache_folders
from accbench.system.stop_signals import StopSignals


class Launcher(launchers.Launcher):
    """A launcher on several nodes by torch elastic; restarts workers, and lets nodes rejoin."""

    restarts_workers = True

    def __init__(self) -> None:
        self._store: Store | None = None
        self._records_bytes = 0
        self._last_run_id: str | None = None
        self._number = 0  # this node's number in the order of joining; the host is 0
        self._shares_folder = True

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        if task.on_oom == "halve":
            return "--on_oom halve is for one machine; with --nnodes lower --batch_size instead"
        try:
            max_nodes = rendezvous.node_range(task)[1]
            endpoint = rendezvous.parse_endpoint(task)
        except RequestError as error:
            return str(error)
        return rendezvous.loopback_problem(endpoint) if max_nodes > 1 else None

    def follows(self, task: TaskConfig) -> bool:
        return not rendezvous.parse_endpoint(task).is_host

    def farewell(self, task: TaskConfig) -> None:
        endpoint = rendezvous.parse_endpoint(task)
        max_nodes = rendezvous.node_range(task)[1]
        with terminal.redirect_stderr(Path(os.devnull)):
            try:
                store = rendezvous.open_store(endpoint, task)
            except RequestError:  # the port is taken; the other nodes end by their timeout
                return
            rendezvous.publish(store, "run", {"id": "over"})
            deadline = time.monotonic() + watching.GRACE_S
            while store.add("nodes", 0) < max_nodes - 1 and time.monotonic() < deadline:
                time.sleep(watching.POLL_S)

    def joined(self, task: TaskConfig) -> Joined | None:
        endpoint = rendezvous.parse_endpoint(task)
        if endpoint.is_host:
            return None
        with terminal.redirect_stderr(Path(os.devnull)):
            self._store, run = rendezvous.wait_for_next_run(endpoint, task, self._last_run_id)
        store, self._last_run_id = self._store, run["id"]
        if run["id"] == "over":
            store.add("nodes", 1)
            raise NoMoreRunsError(f"node 0 at {endpoint} has no more to do")
        if run["what_runs"] != launchers.what_runs():
            raise RequestError(
                f"node 0 has {_format_versions(run['what_runs'])}, and this node "
                f"{_format_versions(launchers.what_runs())}: install the same on all nodes"
            )
        self._number = store.add("nodes", 1)
        name = rendezvous.node_name(endpoint)
        rendezvous.publish(store, f"node {self._number}", name)
        self._records_bytes = run["records_bytes"]
        try:
            return Joined(self._resolve_here(task, run), run["worker"])
        except RequestError as error:  # node 0 would only say that it met nobody
            failure = Failure("error", f"{error} (on {name})", exit_status=2, at=time.time())
            report = node_reports.Report(failure, meeting=None)
            node_reports.send_report(store, self._number, report, logs_folder=None)
            raise

    def _resolve_here(self, task: TaskConfig, run: dict[str, Any]) -> TaskConfig:
        """Return the host's task as this node runs it, and create the run's folder here.

        Raises:
            RequestError: the task cannot run here.
        """
        local = resolving.apply_defaults(task, task.device)
        folder = Path(run["task"]["output_dir"])
        host_task, self._shares_folder = node_reports.prepare_run_folder(
            folder, run["task"], run["id"]
        )
        node_task = replace(
            host_task, nproc_per_node=local.nproc_per_node, threads=local.threads,
            workers=local.workers,
            node_rank=task.node_rank, rdzv_endpoint=task.rdzv_endpoint,
        )  # fmt: skip
        return resolving.resolve(node_task)

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        endpoint = rendezvous.parse_endpoint(task)
        shared = cache_folders.temporary_for_run(task.run_dir)
        with (
            tempfile.TemporaryDirectory(dir=shared) as name,
            StopSignals() as signals,
            contextlib.ExitStack() as stack,
        ):
            folder = Path(name)
            problem = failures.reserve(watching.error_files(folder, task.nproc_per_node).values())
            if problem is not None:
                return problem
            with terminal.redirect_stderr(folder / "launcher.log") as stderr:
                if endpoint.is_host:
                    self._store = rendezvous.open_store(endpoint, task)
                    marker = self._begin(task, worker)
                    stack.callback(marker.unlink, missing_ok=True)
                agent = self._start_agent(task, endpoint, worker, folder, stderr)
                failure = watching.wait_for_agent(agent, task, endpoint, folder, signals)
                report = node_reports.Report(failure, watching.last_meeting(folder))
                assert self._store is not None
                if endpoint.is_host:
                    return self._first_failure(task, report)
                logs_folder = None if self._shares_folder else task.run_dir / "logs"
                node_reports.send_report(self._store, self._number, report, logs_folder)
                return failure

    def _begin(self, task: TaskConfig, worker: list[str]) -> Path:
        """Publish to the other nodes what to run.

        Returns:
            A new file, by which a node knows that it shares the run's folder.

        Raises:
            RequestError: the file cannot be created.
        """
        assert self._store is not None
        run_id = uuid.uuid4().hex
        marker = node_reports.marker_file(task.run_dir, run_id)
        try:
            marker.touch()
        except OSError as error:
            raise RequestError(f"cannot write to {task.run_dir}: {error.strerror}") from None
        records = task.run_dir / config.RECORDS_FILE
        self._records_bytes = records.stat().st_size if records.exists() else 0
        run = {
            "id": run_id,
            "task": json.loads((task.run_dir / config.CONFIG_FILE).read_text()),
            "worker": launchers.anywhere(worker),
            "what_runs": launchers.what_runs(),
            "records_bytes": self._records_bytes,
        }
        rendezvous.publish(self._store, "run", run)
        return marker

    def _start_agent(
        self, task: TaskConfig, endpoint: Endpoint, worker: list[str], folder: Path, stderr: int
    ) -> "subprocess.Popen[bytes]":
        """Start torch elastic's agent, whose workers write to this terminal."""
        address = rendezvous.local_address(endpoint)
        worker = [
            *worker, f"--config={task.run_dir / config.CONFIG_FILE}",
            f"--nproc_per_node={task.nproc_per_node}", f"--threads={task.threads}",
            *([] if task.workers is None else [f"--workers={task.workers}"]),
        ]  # fmt: skip
        plan = {
            "host": endpoint.host, "port": endpoint.port, "rdzv_id": task.rdzv_id,
            "address": address, "nodes": rendezvous.node_range(task), "worker": worker,
            "num_workers": task.nproc_per_node, "max_restarts": task.max_restarts,
            "timeout_s": task.timeout_s,
        }  # fmt: skip
        (folder / watching.PLAN_FILE).write_text(json.dumps(plan))
        interface = network.interface_of(address)
        environment = {
            **launchers.common_env(task),
            **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface}),
            **os.environ,
            **cache_folders.environment(task.run_dir),
            ERROR_FILE_VARIABLE: str(folder / watching.ERROR_FILE),
            RECORDS_BEFORE_VARIABLE: str(self._records_bytes),
            # Otherwise a node that joins later waits for an address that no node publishes again.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        main = launchers.main_of("accbench.launchers.elastic.agent")
        return subprocess.Popen(
            [sys.executable, *main, str(folder), str(os.getpid())],
            env=environment, stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )  # fmt: skip

    def _first_failure(self, task: TaskConfig, host: node_reports.Report) -> Failure | None:
        """Collect the other nodes' reports on the host, and return the failure that came first."""
        assert self._store is not None
        others = range(1, self._store.add("nodes", 0) + 1)
        reports = node_reports.collect_reports(self._store, others, task, watching.GRACE_S)
        lost = [n for n in others if n not in reports]
        failed = _failures_of_run(host, reports.values())
        stopped = [f for f in failed if f.status == "interrupted"]
        if stopped:
            return stopped[0]
        if not failed:
            return None
        first = min(failed, key=lambda failure: failure.at)
        if lost:
            keys = [f"node {n}" for n in lost]
            names = rendezvous.wait_for_published(self._store, keys, 0).values()
            first = replace(first, error=f"{first.error}; no report came from {', '.join(names)}")
        return first


def _failures_of_run(
    host: node_reports.Report, others: Iterable[node_reports.Report]
) -> list[Failure]:
    """Return the failures that bear on how the run ended, the host's first.

    A node may have missed the last meeting: it was one too many, it came too late, or the others
    went on without it. Then its stop is not the run's, and neither is its error, unless the run
    failed, of which that may be the cause. The host itself may be such a node.
    """
    everyone = [host, *others]
    finished = [r.meeting for r in everyone if r.failure is None and r.meeting is not None]
    if host.failure is None or (host.meeting is None and finished):
        return [r.failure for r in everyone if r.failure and r.meeting in finished[:1]]
    return [
        report.failure for report in everyone
        if report.failure and (
            report.failure.status != "interrupted" or host.meeting in (None, report.meeting)
        )
    ]  # fmt: skip


def _format_versions(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
