"""Run a user's script in a worker's process, as Python itself would."""

import contextlib
import random
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError, RunEnded, ScriptExitError
from accbench.training import current
from accbench.training.current import Worker
from accbench.training.opening import open_first_engine


def run(task: TaskConfig, topology: Topology, started: float, console: Any) -> None:
    """Run `--script` from its first line to its last, or until `--max_steps`.

    Raises:
        RequestError: it does not call `accbench.accelerate`.
        ScriptExitError: it ended with an exit status other than 0.
    """
    run_in(Worker(task, topology, started, console))


def run_in(worker: Worker) -> None:
    """Run `--script` in a given worker, as `run` does."""
    task = worker.task
    assert task.script is not None
    # Before the script's first backward pass, at which autograd registers the devices.
    worker.engine = worker.engine or open_first_engine(task, worker.topology)
    # Otherwise ranks and engines would begin with different weights and in a different order,
    # unless the script seeds them itself.
    torch.manual_seed(task.seed)
    random.seed(task.seed)
    np.random.seed(task.seed % 2**32)
    with current.use_worker(worker):
        try:
            with _as_main(task.script, shlex.split(task.script_args)):
                runpy.run_path(task.script, run_name="__main__")
        except RunEnded:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                _let_go(worker)
                raise ScriptExitError(f"{task.script} ended by exit status {end.code}") from None
        except BaseException:
            _let_go(worker)
            raise
        if worker.run is None:
            raise RequestError(
                f"--script {task.script} never called accbench.accelerate(model, optimizer, "
                "loader), by which it would train here"
            )
        worker.run.close()


def _let_go(worker: Worker) -> None:
    if worker.run is not None:
        worker.run.let_go()


@contextlib.contextmanager
def _as_main(path: str, arguments: list[str]) -> Iterator[None]:
    """Set `sys.argv`, and put the script's folder first in `sys.path`, for the block."""
    argv, folders = sys.argv, sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, folders
