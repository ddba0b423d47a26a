"""Workers on this machine, through torch elastic's multiprocessing layer.

That layer rather than the elastic agent: it takes an environment a worker and a
time to end in, and one machine needs no rendezvous. Several machines do: `elastic`.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    start_processes,
)  # fmt: skip

from accbench import config, launchers
from accbench.config import TaskConfig, plugins
from accbench.distributed import network
from accbench.errors import ERROR_FILE_VARIABLE, LAUNCHER_PID_VARIABLE
from accbench.launchers import Failure
from accbench.launchers.common import failures
from accbench.recording import terminal
from accbench.system import cache_folders
from accbench.system.stop_signals import StopSignals

# Seconds that workers have between SIGTERM, which kills them, and SIGKILL, which
# also kills one that is stopped.
GRACE_S = 5
# Seconds between two looks at the workers.
_POLL_S = 0.1


class Launcher(launchers.Launcher):
    """A launcher on this machine, by torch elastic."""

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        # The launcher holds the store where workers meet, so no port is guessed.
        store = network.create_listening_store(network.LOOPBACK, timedelta(seconds=task.timeout_s))
        arguments = (*worker, f"--config={task.run_dir / config.CONFIG_FILE}")
        ranks = range(task.nproc_per_node)
        # Not in the run's folder, whose disk may be full: the errors go here as well.
        with _temporary(task) as elastic_dir, _silenced(), StopSignals() as signals:
            error_files = {rank: Path(elastic_dir) / f"rank{rank}.error.json" for rank in ranks}
            if (problem := failures.reserve(error_files.values())) is not None:
                return problem
            context = start_processes(
                name="accbench",
                entrypoint=sys.executable,
                args={rank: ("-u", *arguments) for rank in ranks},
                envs={
                    rank: worker_env(task, rank, store.port, error_files[rank]) for rank in ranks
                },
                logs_specs=DefaultLogsSpecs(log_dir=elastic_dir),
            )
            assert context is not None
            signals.take()  # from elastic, which raises them in the midst of its own work
            # It closes itself on a failure, with thirty seconds unless told otherwise.
            context.close = partial(context.close, timeout=GRACE_S)  # type: ignore[method-assign]
            first_codes = failures.keep_first_exit_codes(context)
            saves = task.save_interval > 0
            return _wait(context, first_codes, error_files, signals, saves)


def worker_env(task: TaskConfig, rank: int, port: int, error_file: Path) -> dict[str, str]:
    """Build a worker's environment: torchrun's variables, the engine's and accbench's own."""
    engine = plugins.load("engines", task.engine)
    wanted = {**launchers.common_env(task), **engine.worker_env(task, rank)}
    num_workers = str(task.nproc_per_node)
    set_by_user = os.environ.keys() - engine.variables_replaced_by_flags(task)
    return {
        **{name: value for name, value in wanted.items() if name not in set_by_user},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": num_workers,
        "LOCAL_WORLD_SIZE": num_workers,
        "MASTER_ADDR": network.LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        ERROR_FILE_VARIABLE: str(error_file),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


def _temporary(task: TaskConfig) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(dir=cache_folders.temporary_for_run(task.run_dir))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress torch elastic's own reports of failures."""
    elastic_log = logging.getLogger("torch.distributed.elastic")
    level = elastic_log.level
    elastic_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        elastic_log.setLevel(level)


def _wait(
    context: PContext, first_codes: dict[int, int], error_files: dict[int, Path],
    signals: StopSignals, saves: bool,
) -> Failure | None:  # fmt: skip
    """Wait for the workers' end.

    Args:
        context: torch elastic's handle of the workers.
        first_codes: from `failures.keep_first_exit_codes`.
        error_files: rank -> file that the worker writes its error to.
        signals: stop signals to this process.
        saves: whether a worker saves and ends at the first SIGTERM.
    """
    pids = list(context.pids().values())
    passed_on = False
    result = None
    try:
        while result is None:
            # A forced stop is looked at before the workers, which a Ctrl-C may reach as well.
            if signals.forced or (signals.graceful and not saves):
                context.close(death_sig=signal.SIGKILL if saves else signal.SIGTERM)
                break
            if signals.graceful and not passed_on:
                failures.send(signal.SIGTERM, pids)
                passed_on = True
            result = context.wait(timeout=0)
            if result is None:
                time.sleep(_POLL_S)
    finally:
        failures.end_groups(pids)
        console = terminal.person_console()
        if console.is_terminal:
            console.show_cursor()  # rank 0's progress bar may have died with it hidden
    stopped = None
    if number := signals.forced or signals.graceful:
        stopped = Failure("interrupted", f"stopped by {number.name}", exit_status=130)
    if result is None:
        return stopped
    if not result.failures:
        return None
    all_codes = {rank: process.exitcode for rank, process in result.failures.items()}
    failure = failures.first_failure(first_codes or all_codes, error_files)
    # As "error" it ended before there was anything to save.
    return stopped if stopped and failure.status == "error" else failure
