"""One run from its flags to its end: check them, claim the folder, launch, tell how it went."""

import contextlib
import sys
from collections.abc import Sequence

from accbench import config, launchers, plugins
from accbench.errors import RequestError, refused


def run(argv: Sequence[str], prog: str, worker: Sequence[str] = ()) -> int:
    """Train a model, one worker a device; returns the exit status.

    Args:
        argv: the flags of a run.
        prog: what messages call the command.
        worker: arguments to the Python interpreter that start a worker.
    """
    with contextlib.ExitStack() as stack:
        try:
            task = config.resolve(config.parse(argv, prog))
            task = stack.enter_context(config.claim_output_dir(task))
            launcher = plugins.load("launchers", task.launcher)()
        except RequestError as error:
            return refused(prog, error)
        # The workers' imports take seconds in which nothing else is said.
        print(f"starting {task.nproc_per_node} x {task.engine}, logs in {task.run_dir / 'logs'}")
        sys.stdout.flush()
        failure = launcher.launch(task, list(worker) or ["-m", "accbench.training.worker_process"])
        return launchers.conclude(task.run_dir, failure)
