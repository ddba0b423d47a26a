"""A rank of `--launcher dask`: a task that starts accbench's worker as a process of its own.

A process, so that a crash of training is not the Dask worker's, which also is a daemon that may
have no children and has long started its threads.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accbench import config, launchers, plugins, resolving
from accbench.errors import ERROR_FILE_VARIABLE, LAUNCHER_PID_VARIABLE, RequestError
from accbench.launchers import failures
from accbench.launchers.dask import meeting, places
from accbench.launchers.dask.mirror import Mirror
from accbench.launchers.dask.places import Place
from accbench.launchers.dask.results import DaskResultsHandler
from accbench.launchers.dask.sending import Sender

# Seconds between SIGTERM and SIGKILL, as with the local launcher.
_GRACE_S = 5.0
_POLL_S, _LOOK_S = 0.1, 0.5
# Seconds in which a file of the client's becomes visible on a shared disk.
_VISIBLE_S = 2.0
_OUTPUT_BYTES = 1 << 20
# What the client tells the ranks: to save and end, as a first SIGTERM; or to end.
WISH, ORDER = "wish", "order"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the client has every rank do."""

    call_id: str
    task: dict[str, Any]
    """As `config.as_mapping` has it."""
    run_dir: str
    """At the client."""
    token: str
    """Name of an empty file in it, by which a machine that shares the folder is known."""
    worker: list[str]
    """Arguments to the Python interpreter that start a worker."""
    what_runs: dict[str, str]


def resolve(task: config.TaskConfig, place: Place) -> config.TaskConfig:
    """What this machine makes of a task; a task on a Dask worker.

    Raises:
        RequestError: it cannot run here.
    """
    num_ranks = task.nproc_per_node
    try:
        here = resolving.resolve(dataclasses.replace(task, nproc_per_node=place.local_world_size))
    except RequestError as error:
        raise RequestError(f"{error} (on {socket.gethostname()})") from None
    return dataclasses.replace(here, nproc_per_node=num_ranks)


def train(plan: Plan, place: Place, handler: DaskResultsHandler, key: str) -> None:
    """Run one rank's worker to its end; a task on a Dask worker.

    How it ended, and what it says, the client learns through the handler.

    Raises:
        RequestError: this machine lacks what the task needs.
    """
    from distributed import get_worker

    call = meeting.Call(plan.call_id, key, get_worker())
    if plan.what_runs != (here := launchers.what_runs()):
        names = ", ".join(f"{name} {here[name]}, not {v}" for name, v in plan.what_runs.items())
        raise RequestError(f"{place} has {names}: install the same there as at the client")
    with tempfile.TemporaryDirectory() as own, meeting.held(call, place) as store:
        sender = handler.sender()
        shared = _visible(Path(plan.run_dir) / plan.token)
        run_dir = Path(plan.run_dir) if shared else _own_run_dir(plan, Path(own))
        parts = None if place.rank == 0 else ("logs",)
        mirror = None if shared else Mirror(sender, run_dir, plan.run_dir, parts)
        task = config.parse([f"--config={run_dir / config.CONFIG_FILE}"], "accbench run")
        error_file, output = Path(own) / "error.json", Path(own) / "output"
        if (problem := failures.reserve([error_file])) is not None:
            raise RequestError(problem.error)
        environment = _environment(task, place, store, error_file)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", *plan.worker, f"--config={run_dir / config.CONFIG_FILE}"],
                env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        try:
            told = _follow(process, call, sender, output, mirror)
        finally:
            failures.end_groups([process.pid])
            process.wait()
        outcome = {
            "rank": place.rank, "exit_code": process.returncode,
            "error": failures.read_error(error_file), "ordered": ORDER in told,
        }  # fmt: skip
        sender.send("outcome", "", json.dumps(outcome).encode())


def _visible(path: Path) -> bool:
    until = time.monotonic() + _VISIBLE_S
    while path.parent.exists() and not path.exists() and time.monotonic() < until:
        time.sleep(0.2)
    return path.exists()


def _own_run_dir(plan: Plan, own: Path) -> Path:
    """A run's folder on this machine, for the time of the run.

    Raises:
        RequestError: the task needs what is in the client's.
    """
    several = plan.task.get("nproc_per_node", 1) > 1 and plan.task.get("on_nan") == "rollback"
    for asked, what in (
        (plan.task.get("resume"), "--resume"), (several, "--on_nan rollback"),
        (plan.task.get("max_restarts"), "--max_restarts"),
        (plan.worker != list(launchers.WORKER), "what this command runs"),
    ):  # fmt: skip
        if asked:
            raise RequestError(
                f"{what} needs a run's folder that all machines share, and {plan.run_dir} is not "
                f"on {socket.gethostname()}: name an --output_dir that is"
            )
    run_dir = own / f"run-{plan.call_id}"
    (run_dir / "logs").mkdir(parents=True)
    task = {**plan.task, "output_dir": str(run_dir)}
    (run_dir / config.CONFIG_FILE).write_text(json.dumps(task))
    return run_dir


def _environment(
    task: config.TaskConfig, place: Place, store: Any, error_file: Path
) -> dict[str, str]:
    engine = plugins.load("engines", task.engine)
    inherited = dict(os.environ)
    for name, value in _of_nanny().items():  # one thread, which nobody has asked for
        if inherited.get(name) == value:
            del inherited[name]
    wanted = {**launchers.common_env(task), **engine.worker_env(task, place.local_rank)}
    visible = places.visible_devices(store, place)
    if (own := places.own_first(visible)) is not None:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(own)  # the same for all, by local rank
    return {
        **wanted,
        **meeting.interface_env(place.host),
        **inherited,
        **place.env,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        ERROR_FILE_VARIABLE: str(error_file),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


def _of_nanny() -> dict[str, str]:
    """What Dask's nanny sets in the environment of its worker."""
    import dask

    found: dict[str, str] = {}
    for part in ("pre-spawn-environ", "environ"):
        settings = dask.config.get(f"distributed.nanny.{part}", {}) or {}
        found |= {name: str(value) for name, value in settings.items()}
    return found


def _follow(
    process: "subprocess.Popen[bytes]", call: meeting.Call, sender: Sender, output: Path,
    mirror: Mirror | None,
) -> set[str]:  # fmt: skip
    """Pass on what a worker says until it ends, and what the client says to it; returns that."""
    sent, looked_at, killed_at = 0, 0.0, float("inf")
    asked: set[str] = set()
    while True:
        ended = process.poll() is not None
        sent = _send_output(sender, output, sent, mirror, ended)
        if mirror is not None:
            mirror.update(last=ended)
        if ended:
            return asked
        if time.monotonic() - looked_at > _LOOK_S:
            looked_at = time.monotonic()
            stop = call.told().get("stop") if call.goes_on() else ORDER
            if stop is not None and stop not in asked:
                asked.add(stop)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                killed_at = time.monotonic() + _GRACE_S if stop == ORDER else killed_at
        if time.monotonic() > killed_at:
            process.kill()
        time.sleep(_POLL_S)


def _send_output(
    sender: Sender, output: Path, sent: int, mirror: Mirror | None, ended: bool
) -> int:
    """Send whole lines, and what is left at the end; returns the bytes sent of all there is."""
    while True:
        with output.open("rb") as file:
            file.seek(sent)
            new = file.read(_OUTPUT_BYTES)
        if not ended and len(new) < _OUTPUT_BYTES:
            new = new[: new.rfind(b"\n") + 1]
        if not new:
            return sent
        sender.send("print", "", new if mirror is None else mirror.renamed(new))
        sent += len(new)
