"""A task as flags ask for it, and what this machine makes of it."""

import dataclasses
import os

from accbench import config, extras, models, plugins
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.recording import board


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(task: TaskConfig) -> TaskConfig:
    """Fill in what depends on the machine, and check all that can be known before a run.

    Raises:
        RequestError: the task cannot run here; the message says why and what to do.
    """
    engine = plugins.load("engines", task.engine)
    plugins.load("launchers", task.launcher)
    source_name, location = config.data_name(task.data)
    source = plugins.load("data", source_name)
    models.of_task(task)
    device = engine.find_device(task.device)
    cores_per_worker = max(1, num_cores() // task.nproc_per_node)
    task = dataclasses.replace(
        task,
        device=device,
        batch_size=task.batch_size or (8 if device == "cpu" else 128),
        amp_dtype=task.amp_dtype or ("float16" if device == "cuda" else "bfloat16"),
        workers=min(8, cores_per_worker) if task.workers is None else task.workers,
        threads=task.threads or cores_per_worker,
    )
    assert task.batch_size is not None
    if task.batch_size % task.accumulate:
        raise RequestError(
            f"--batch_size {task.batch_size} cannot be cut into --accumulate {task.accumulate} "
            "equal parts"
        )
    if task.tensorboard == "on" and not board.installed():
        raise RequestError(
            "--tensorboard on needs TensorBoard, which is not installed: "
            + extras.install_command("tensorboard")
        )
    if task.nesterov and not task.momentum:
        raise RequestError("--nesterov needs a --momentum above 0")
    if task.resume == "auto" and task.output_dir is None:
        raise RequestError("--resume auto looks for checkpoints in --output_dir; name that too")
    if not task.save_interval and (task.save_steps is not None or task.on_nan == "rollback"):
        asked = "--save_steps" if task.save_steps is not None else "--on_nan rollback"
        raise RequestError(f"{asked} needs checkpoints, and --save_interval 0 makes none")
    reason = engine.unavailable_reason(task)
    if reason is not None:
        raise RequestError(reason)
    source.check(location)
    return task
