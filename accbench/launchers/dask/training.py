"""A rank of `--launcher dask`: a task that runs accbench's worker in a process of its own.

A separate process keeps a crash of training from killing the Dask worker. Besides, a Dask worker
is a daemon, which cannot have child processes, and has already started threads.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accbench import config, launchers, resolving
from accbench.config import plugins
from accbench.errors import ERROR_FILE_VARIABLE, LAUNCHER_PID_VARIABLE, RequestError
from accbench.launchers.common import failures
from accbench.launchers.dask import rank_assignment, rendezvous
from accbench.launchers.dask.event_log import EventSender
from accbench.launchers.dask.folder_sync import FolderSync
from accbench.launchers.dask.rank_assignment import RankAssignment
from accbench.launchers.dask.results import DaskResultsHandler

# Seconds between SIGTERM and SIGKILL, as in the local launcher.
_GRACE_S = 5.0
_POLL_S, _CHECK_S = 0.1, 0.5
# Seconds until a file that the client created is visible on a shared disk.
_VISIBLE_S = 2.0
_OUTPUT_BYTES = 1 << 20
# The client's requests to the ranks: save a checkpoint and end, as on a first SIGTERM; or end.
SAVE_AND_STOP, STOP_NOW = "save_and_stop", "stop_now"


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """The client's request to every rank of a run."""

    call_id: str
    task: dict[str, Any]
    """The task, as `config.as_mapping` returns it."""
    run_dir: str
    """The run's folder at the client."""
    token: str
    """Name of an empty file in the folder, by which a machine knows that it shares the folder."""
    worker: list[str]
    """Arguments to the Python interpreter that start a worker."""
    versions: dict[str, str]
    """The client's versions, as `launchers.what_runs` returns them."""


def resolve(task: config.TaskConfig, assignment: RankAssignment) -> config.TaskConfig:
    """Resolve a task on this machine; runs as a task on a Dask worker.

    Raises:
        RequestError: the task cannot run here.
    """
    num_ranks = task.nproc_per_node
    try:
        resolved = resolving.resolve(
            dataclasses.replace(task, nproc_per_node=assignment.local_world_size)
        )
    except RequestError as error:
        raise RequestError(f"{error} (on {socket.gethostname()})") from None
    return dataclasses.replace(resolved, nproc_per_node=num_ranks)


def train(
    request: RunRequest, assignment: RankAssignment, handler: DaskResultsHandler, key: str
) -> None:
    """Run one rank's worker until it ends; runs as a task on a Dask worker.

    The handler carries its output and how it ended to the client.

    Raises:
        RequestError: this machine lacks what the task needs.
    """
    from distributed import get_worker

    call = rendezvous.RankCall(request.call_id, key, get_worker())
    if request.versions != (local := launchers.what_runs()):
        names = ", ".join(f"{name} {local[name]}, not {v}" for name, v in request.versions.items())
        raise RequestError(f"{assignment} has {names}: install the client's versions there")
    with (
        tempfile.TemporaryDirectory() as folder,
        rendezvous.rendezvous_store(call, assignment) as store,
    ):
        sender = handler.sender()
        is_shared = _becomes_visible(Path(request.run_dir) / request.token)
        client_dir = Path(request.run_dir)
        run_dir = client_dir if is_shared else _make_local_run_dir(request, Path(folder))
        subfolders = None if assignment.rank == 0 else ("logs",)
        folder_sync = (
            None if is_shared else FolderSync(sender, run_dir, request.run_dir, subfolders)
        )
        task = config.parse([f"--config={run_dir / config.CONFIG_FILE}"], "accbench run")
        error_file, output = Path(folder) / "error.json", Path(folder) / "output"
        if (problem := failures.reserve([error_file])) is not None:
            raise RequestError(problem.error)
        environment = _environment(task, assignment, store, error_file)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", *request.worker, f"--config={run_dir / config.CONFIG_FILE}"],
                env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        try:
            stop_requests = _StopRequests(process, call)
            sender.check = stop_requests.forward
            _relay(process, stop_requests, sender, output, folder_sync)
        finally:
            failures.end_groups([process.pid])
            process.wait()
        outcome = {
            "rank": assignment.rank, "exit_code": process.returncode,
            "error": failures.read_error(error_file),
            "ordered": STOP_NOW in stop_requests.received,
        }  # fmt: skip
        sender.send("outcome", "", json.dumps(outcome).encode())


def _becomes_visible(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_S
    while path.parent.exists() and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return path.exists()


def _make_local_run_dir(request: RunRequest, folder: Path) -> Path:
    """Create a run's folder on this machine, for the time of the run.

    Raises:
        RequestError: the task needs files of the client's folder.
    """
    has_ranks = request.task.get("nproc_per_node", 1) > 1
    rolls_back = has_ranks and request.task.get("on_nan") == "rollback"
    for is_set, what in (
        (request.task.get("resume"), "--resume"), (rolls_back, "--on_nan rollback"),
        (request.task.get("max_restarts"), "--max_restarts"),
        (request.worker != list(launchers.WORKER), "what this command runs"),
    ):  # fmt: skip
        if is_set:
            raise RequestError(
                f"{what} needs a run's folder that all machines share, and {request.run_dir} "
                f"is not on {socket.gethostname()}: name an --output_dir that is"
            )
    run_dir = folder / f"run-{request.call_id}"
    (run_dir / "logs").mkdir(parents=True)
    task = {**request.task, "output_dir": str(run_dir)}
    (run_dir / config.CONFIG_FILE).write_text(json.dumps(task))
    return run_dir


def _environment(
    task: config.TaskConfig, assignment: RankAssignment, store: Any, error_file: Path
) -> dict[str, str]:
    engine = plugins.load("engines", task.engine)
    replaced = engine.variables_replaced_by_flags(task)
    inherited = {name: value for name, value in os.environ.items() if name not in replaced}
    for name, value in _nanny_environment().items():  # such as one thread, which nobody asked for
        if inherited.get(name) == value:
            del inherited[name]
    defaults = {**launchers.common_env(task), **engine.worker_env(task, assignment.local_rank)}
    visible = rank_assignment.visible_devices(store, assignment)
    if (devices := rank_assignment.distinct_first_devices(visible)) is not None:
        # The same for all ranks of the host, indexed by local rank.
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {
        **defaults,
        **rendezvous.interface_env(assignment.host),
        **inherited,
        **assignment.env,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        ERROR_FILE_VARIABLE: str(error_file),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


def _nanny_environment() -> dict[str, str]:
    """Return the variables that Dask's nanny sets in its worker's environment."""
    import dask

    variables: dict[str, str] = {}
    for part in ("pre-spawn-environ", "environ"):
        settings = dask.config.get(f"distributed.nanny.{part}", {}) or {}
        variables |= {name: str(value) for name, value in settings.items()}
    return variables


class _StopRequests:
    """The client's stop requests, which are forwarded to a worker's process."""

    def __init__(self, process: "subprocess.Popen[bytes]", call: rendezvous.RankCall) -> None:
        self.process, self.call = process, call
        self.received: set[str] = set()
        self._checked_at, self._stopped_at = 0.0, float("inf")

    def forward(self) -> None:
        """Ask the scheduler for requests, at most twice a second, and forward a new one.

        A worker that was told to end at once is killed if it has not ended after some seconds.

        Raises:
            CallEndedError: it was killed, and its last messages are taking as long again.
        """
        now = time.monotonic()
        if now - self._checked_at > _CHECK_S:
            self._checked_at = now
            stop = self.call.metadata().get("stop") if self.call.is_wanted() else STOP_NOW
            if stop == STOP_NOW:
                self._stopped_at = min(self._stopped_at, now)
            # A worker that has already ended did not end because of the request.
            if stop is not None and stop not in self.received and self.process.poll() is None:
                self.received.add(stop)
                self.process.terminate()
        stopped_s = now - self._stopped_at
        if stopped_s > _GRACE_S:
            self.process.kill()
        if stopped_s > 2 * _GRACE_S:
            raise rendezvous.CallEndedError("told to stop, or its client has gone")


def _relay(
    process: "subprocess.Popen[bytes]", stop_requests: _StopRequests, sender: EventSender,
    output: Path, folder_sync: FolderSync | None,
) -> None:  # fmt: skip
    """Relay a worker's output and the client's stop requests until the worker ends."""
    sent = 0
    while True:
        ended = process.poll() is not None
        sent = _send_output(sender, output, sent, folder_sync, ended)
        if folder_sync is not None:
            folder_sync.update(last=ended)
        if ended:
            return
        stop_requests.forward()
        time.sleep(_POLL_S)


def _send_output(
    sender: EventSender, output: Path, sent: int, folder_sync: FolderSync | None, ended: bool
) -> int:
    """Send new complete lines, and at the end also an incomplete one.

    Returns:
        The bytes of the output that are now sent.
    """
    while True:
        with output.open("rb") as file:
            file.seek(sent)
            new = file.read(_OUTPUT_BYTES)
        if not ended and len(new) < _OUTPUT_BYTES:
            new = new[: new.rfind(b"\n") + 1]
        if not new:
            return sent
        sender.send(
            "print", "", new if folder_sync is None else folder_sync.with_client_folder(new)
        )
        sent += len(new)
