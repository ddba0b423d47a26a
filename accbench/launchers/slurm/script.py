"""The sbatch script of a run."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from accbench import launchers
from accbench.config import TaskConfig

# Characters at which sbatch ends an argument of a script, or reads it otherwise.
_SPECIAL = re.compile(r"""[\s"'\\#]""")


def render(task: TaskConfig, worker: list[str], folder: Path, is_held: bool) -> str:
    """Render the sbatch script.

    Args:
        task: the task to run.
        worker: arguments to the Python interpreter that start a worker.
        folder: the run's folder, on a disk that all nodes share.
        is_held: whether the submitter locks the folder until the job's end.
    """
    options: Any = task.options["slurm"]
    model = task.script or task.model
    sbatch_options = {
        "job-name": f"accbench-{task.engine}-{Path(model).stem}".replace(":", "-"),
        "nodes": task.nnodes,
        "ntasks-per-node": task.nproc_per_node,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "cpus-per-task": task.threads,
        # Per node, not per task: tasks that see only their own GPU have no peer access.
        "gpus-per-node": task.nproc_per_node if task.device == "cuda" else None,
        "signal": f"TERM@{options.signal_s}",
        "requeue": True,
        "open-mode": "append",
        "output": folder / "logs" / "slurm-%j.log",
    }
    lines = ["#!/bin/bash"]
    for name, value in sbatch_options.items():
        if value is not None:
            argument = "" if value is True else f"={_quote(str(value))}"
            lines.append(f"#SBATCH --{name}{argument}")
    lines += [f"#SBATCH {_quote(argument)}" for argument in shlex.split(options.sbatch_args)]
    job_main = launchers.main_of("accbench.launchers.slurm.job")
    lock_state = "held" if is_held else "free"
    # Said here too: each job on the folder writes down the checkpoint that it has chosen.
    resume = "auto" if task.resume == "auto" else "as-written"
    command = [sys.executable, *job_main, str(folder), lock_state, resume, *worker]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _quote(argument: str) -> str:
    """Quote an argument as sbatch reads it, which unlike a shell escapes within any quotes."""
    if not _SPECIAL.search(argument):
        return argument
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
