"""One run: check the flags, claim the folder, launch the workers, and report how they ended."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from accbench import config, launchers, resolving
from accbench.config import TaskConfig, plugins
from accbench.errors import STOPPED_STATUS, NoMoreRunsError, RequestError, print_refusal
from accbench.recording import run_folder
from accbench.report import run as runs
from accbench.training import resume


def run(argv: Sequence[str], prog: str, worker: Sequence[str] = (), attached: bool = False) -> int:
    """Train a model with one worker per device, and return the exit status.

    Args:
        argv: the flags of a run.
        prog: the command's name in messages.
        worker: arguments to the Python interpreter that start a worker.
        attached: whether to wait for the run's end even if the launcher only submits it.
    """
    with contextlib.ExitStack() as stack:
        arguments = list(worker or launchers.WORKER)
        try:
            task = config.parse(argv, prog)
            resolving.restart_for([task.engine], argv)
            task = launchers.resolve(task)
            launcher = plugins.load("launchers", task.launcher)()
            launcher.attached = attached
            if task.dry_run:
                print(launcher.script(task, arguments), end="")
                return 0
            if (joined := launcher.joined(task)) is not None:
                return _take_part(launcher, joined)
            task = stack.enter_context(run_folder.claim_output_dir(task))
            if launcher.starts_later and task.resume == "auto":
                resume.with_checkpoint_later(task, _say)
            else:
                task = resume.with_checkpoint(task, _say)
        except RequestError as error:
            return print_refusal(prog, error)
        # The workers' imports take seconds, in which nothing else is printed.
        _say(f"starting {task.nproc_per_node} x {task.engine}, logs in {task.run_dir / 'logs'}")
        num_restarts = 0
        while (failure := _launch(launcher, task, arguments)) is not None:
            if failure.status == "oom":
                failure = replace(failure, error=_out_of_memory_message(task, failure.error))
            if failure.status == "oom" and task.on_oom == "halve" and (task.batch_size or 1) > 1:
                halved = (task.batch_size or 1) // 2
                accumulate = math.gcd(halved, task.accumulate)  # micro-batches stay equal
                task = replace(task, batch_size=halved, accumulate=accumulate)
                notice = f"starting again with --batch_size {task.batch_size}"
            elif launcher.restarts_workers:
                break
            elif failure.may_be_tried_again and num_restarts < task.max_restarts:
                num_restarts += 1
                notice = f"starting again, {num_restarts} of {task.max_restarts}"
            else:
                break
            launchers.tell(task.run_dir, failure)
            try:
                task = resume.with_newest_checkpoint(task, _say)
            except RequestError as error:
                return print_refusal(prog, error)
            _say(notice)
        return launchers.conclude(task.run_dir, failure)


def _launch(
    launcher: launchers.Launcher, task: TaskConfig, worker: list[str]
) -> launchers.Failure | None:
    try:
        return launcher.launch(task, worker)
    except RequestError as error:
        return launchers.Failure("error", str(error), exit_status=2)


def follow(task: TaskConfig, prog: str) -> int:
    """Take part in a comparison's runs, one after another, until there are no more."""
    launcher = plugins.load("launchers", task.launcher)()
    while True:
        try:
            joined = launcher.joined(task)
        except NoMoreRunsError:
            return 0
        except RequestError as error:
            return print_refusal(prog, error)
        assert joined is not None
        if _take_part(launcher, joined) in (STOPPED_STATUS, 130):
            return 130


def _take_part(launcher: launchers.Launcher, joined: launchers.Joined) -> int:
    """Run this node's workers of a run whose folder and record another node keeps."""
    task = joined.task
    logs = task.run_dir / "logs"
    _say(f"starting {task.nproc_per_node} x {task.engine} for node 0, logs in {logs}")
    failure = _launch(launcher, task, joined.worker)
    if failure is None:
        return 0
    launchers.tell(task.run_dir, failure)
    return failure.exit_status


def _out_of_memory_message(task: TaskConfig, error: str) -> str:
    """Return an out-of-memory message with the batch size, the peak and what may help."""
    peak = runs.read_if_there(task.run_dir).warmup_peak_memory_bytes
    peak_text = f", {peak / 2**30:.2f} GiB at most until then" if peak else ""
    return (
        f"{error}; out of memory with --batch_size {task.batch_size} a worker{peak_text}: lower "
        "it, or use --on_oom halve"
    )


def _say(line: str) -> None:
    print(line, flush=True)
