"""One run from its flags to its end: check them, claim the folder, launch, tell how it went."""

import contextlib
from collections.abc import Sequence

from accbench import config, launchers, plugins
from accbench.errors import RequestError, refused
from accbench.training import resume


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
            task = resume.claimed(task, _say)
            launcher = plugins.load("launchers", task.launcher)()
        except RequestError as error:
            return refused(prog, error)
        # The workers' imports take seconds in which nothing else is said.
        _say(f"starting {task.nproc_per_node} x {task.engine}, logs in {task.run_dir / 'logs'}")
        arguments = list(worker) or ["-m", "accbench.training.worker_process"]
        failure = launcher.launch(task, arguments)
        for number in range(1, task.max_restarts + 1):
            if failure is None or not failure.may_be_tried_again:
                break
            launchers.tell(task.run_dir, failure)
            try:
                task = resume.restarted(task, _say)
            except RequestError as error:
                return refused(prog, error)
            _say(f"starting again, {number} of {task.max_restarts}")
            failure = launcher.launch(task, arguments)
        return launchers.conclude(task.run_dir, failure)


def _say(line: str) -> None:
    print(line, flush=True)
