"""Workers on several machines, through torch elastic's agent: one launcher a node.

The same command on every node, `--node_rank 0` on one, as with torchrun. That one makes the
run's folder and keeps its record; the others take the task from it, so that all train the same.

torch elastic's agent runs in a process of its own. It reaches for the rendezvous's store
between two looks at its workers, and where the link is cut it waits there for ever and hears
no signal; so its launcher watches it, and ends it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from accbench import config, launchers, network, resolving
from accbench.config import TaskConfig
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    RECORDS_BEFORE_VARIABLE,
    NoMoreRunsError,
    RequestError,
)  # fmt: skip
from accbench.launchers import Failure, Joined, failures
from accbench.launchers.elastic import collected, meeting, watching
from accbench.launchers.elastic.meeting import Endpoint
from accbench.recording import terminal
from accbench.stop_signals import StopSignals


class Launcher(launchers.Launcher):
    """torch elastic over several nodes; takes nodes in again, and restarts workers."""

    restarts_workers = True

    def __init__(self) -> None:
        self._store: Store | None = None
        self._records_bytes = 0
        self._joined_last: str | None = None
        self._number = 0  # of this node among those that joined; the host is 0

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        if task.on_oom == "halve":
            return "--on_oom halve is for one machine; with --nnodes lower --batch_size instead"
        try:
            meeting.nodes_of(task)
            meeting.endpoint_of(task)
        except RequestError as error:
            return str(error)
        return None

    def follows(self, task: TaskConfig) -> bool:
        return not meeting.endpoint_of(task).is_host

    def farewell(self, task: TaskConfig) -> None:
        endpoint = meeting.endpoint_of(task)
        most = meeting.nodes_of(task)[1]
        with terminal.redirect_stderr(Path(os.devnull)):
            try:
                store = meeting.open_store(endpoint, task)
            except RequestError:  # somebody has the port by now; the others end by their timeout
                return
            meeting.publish(store, "run", {"id": "over"})
            until = time.monotonic() + watching.GRACE_S
            while store.add("nodes", 0) < most - 1 and time.monotonic() < until:
                time.sleep(watching.POLL_S)

    def joined(self, task: TaskConfig) -> Joined | None:
        endpoint = meeting.endpoint_of(task)
        if endpoint.is_host:
            return None
        with terminal.redirect_stderr(Path(os.devnull)):
            self._store, told = meeting.next_run(endpoint, task, self._joined_last)
        store, self._joined_last = self._store, told["id"]
        if told["id"] == "over":
            store.add("nodes", 1)
            raise NoMoreRunsError(f"node 0 at {endpoint} has no more to do")
        if told["what_runs"] != launchers.what_runs():
            raise RequestError(
                f"node 0 has {_in_words(told['what_runs'])}, and this one "
                f"{_in_words(launchers.what_runs())}: install the same on all nodes"
            )
        self._number = store.add("nodes", 1)
        meeting.publish(store, f"node {self._number}", meeting.name_of_node(endpoint))
        own = resolving.apply_defaults(task, task.device)
        folder = Path(told["task"]["output_dir"])
        found = collected.take_over(folder, told["task"])
        found = replace(
            found, nproc_per_node=own.nproc_per_node, threads=own.threads, workers=own.workers,
            node_rank=task.node_rank, rdzv_endpoint=task.rdzv_endpoint,
        )  # fmt: skip
        self._records_bytes = told["records_bytes"]
        return Joined(resolving.resolve(found), told["worker"])

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        endpoint = meeting.endpoint_of(task)
        with tempfile.TemporaryDirectory() as name, StopSignals() as signals:
            folder = Path(name)
            problem = failures.reserve(watching.error_files(folder, task.nproc_per_node).values())
            if problem is not None:
                return problem
            with terminal.redirect_stderr(folder / "launcher.log") as stderr:
                if endpoint.is_host:
                    self._store = meeting.open_store(endpoint, task)
                    self._begin(task, worker)
                agent = self._start_agent(task, endpoint, worker, folder, stderr)
                failure = watching.to_its_end(agent, task, endpoint, folder, signals)
                assert self._store is not None
                if endpoint.is_host:
                    return self._of_all(task, failure)
                collected.give(self._store, self._number, task, failure)
                return failure

    def _begin(self, task: TaskConfig, worker: list[str]) -> None:
        """Tell the other nodes what to run."""
        assert self._store is not None
        records = task.run_dir / config.RECORDS_FILE
        self._records_bytes = records.stat().st_size if records.exists() else 0
        told = {
            "id": uuid.uuid4().hex,
            "task": json.loads((task.run_dir / config.CONFIG_FILE).read_text()),
            "worker": launchers.anywhere(worker),
            "what_runs": launchers.what_runs(),
            "records_bytes": self._records_bytes,
        }
        meeting.publish(self._store, "run", told)

    def _start_agent(
        self, task: TaskConfig, endpoint: Endpoint, worker: list[str], folder: Path, stderr: int
    ) -> "subprocess.Popen[bytes]":
        """torch elastic's agent, whose workers write to this terminal."""
        address = meeting.local_address(endpoint)
        worker = [
            *worker, f"--config={task.run_dir / config.CONFIG_FILE}",
            f"--nproc_per_node={task.nproc_per_node}", f"--threads={task.threads}",
            *([] if task.workers is None else [f"--workers={task.workers}"]),
        ]  # fmt: skip
        plan = {
            "host": endpoint.host, "port": endpoint.port, "rdzv_id": task.rdzv_id,
            "address": address, "nodes": meeting.nodes_of(task), "worker": worker,
            "num_workers": task.nproc_per_node, "max_restarts": task.max_restarts,
            "timeout_s": task.timeout_s,
        }  # fmt: skip
        (folder / watching.PLAN_FILE).write_text(json.dumps(plan))
        interface = network.interface_of(address)
        environment = {
            **launchers.common_env(task),
            **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface}),
            **os.environ,
            ERROR_FILE_VARIABLE: str(folder / watching.ERROR_FILE),
            RECORDS_BEFORE_VARIABLE: str(self._records_bytes),
            # Or a node that joins later waits for an address that nobody tells it any more.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        main = launchers.main_of("accbench.launchers.elastic.agent")
        return subprocess.Popen(
            [sys.executable, *main, str(folder), str(os.getpid())],
            env=environment, stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )  # fmt: skip

    def _of_all(self, task: TaskConfig, own: Failure | None) -> Failure | None:
        """The host's last act: hear how the others ended, and say what caused it."""
        assert self._store is not None
        others = range(1, self._store.add("nodes", 0) + 1)
        of_others = collected.take(self._store, others, task, watching.GRACE_S)
        lost = [n for n in others if n not in of_others]
        found = [f for f in (own, *of_others.values()) if f is not None]
        stopped = [f for f in found if f.status == "interrupted"]
        if stopped:
            return stopped[0]
        if not found:
            return None
        first = min(found, key=lambda failure: failure.at)
        if lost:
            keys = [f"node {n}" for n in lost]
            names = meeting.published_soon(self._store, keys, 0).values()
            first = replace(
                first, error=f"{first.error}; nothing more came from {', '.join(names)}"
            )
        return first


def _in_words(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
