"""The sbatch script of a run."""

import shlex
import sys
from pathlib import Path
from typing import Any

from accbench import launchers
from accbench.config import TaskConfig


def text(task: TaskConfig, worker: list[str], folder: Path, is_held: bool) -> str:
    """The script, whole.

    Args:
        folder: the run's, on a disk that all nodes share.
        is_held: whether who submits keeps others out of it until the job's end.
    """
    options: Any = task.options["slurm"]
    model = task.script or task.model
    wanted = {
        "job-name": f"accbench-{task.engine}-{Path(model).stem}".replace(":", "-"),
        "nodes": task.nnodes,
        "ntasks-per-node": task.nproc_per_node,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "cpus-per-task": task.threads,
        # Of the node, not of each task: tasks that see only their own have no peer access.
        "gpus-per-node": task.nproc_per_node if task.device == "cuda" else None,
        "signal": f"TERM@{options.signal_s}",
        "requeue": True,
        "open-mode": "append",
        "output": folder / "logs" / "slurm-%j.log",
    }
    lines = ["#!/bin/bash"]
    for name, value in wanted.items():
        if value is not None:
            lines.append(f"#SBATCH --{name}" + ("" if value is True else f"={value}"))
    lines += [f"#SBATCH {argument}" for argument in shlex.split(options.sbatch_args)]
    driver = launchers.main_of("accbench.launchers.slurm.job")
    holds = "held" if is_held else "free"
    command = [sys.executable, *driver, str(folder), holds, *worker]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
