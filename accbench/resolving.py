"""Resolve a task: fill in what its flags leave open, for this machine."""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accbench import config, models
from accbench.config import TaskConfig, plugins
from accbench.errors import RequestError
from accbench.recording import tensorboard_writer
from accbench.system import cgroups, extras, other_environment


def resolve(task: TaskConfig) -> TaskConfig:
    """Fill in what depends on the machine, and check all that can be known before a run.

    Raises:
        RequestError: the task cannot run here; the message says why and what to do.
    """
    engine = plugins.load("engines", task.engine)
    task = apply_defaults(task, engine.find_device(task.device))
    if task.tensorboard == "on" and not tensorboard_writer.is_installed():
        raise RequestError(
            "--tensorboard on needs TensorBoard, which is not installed: "
            + extras.install_command("tensorboard")
        )
    reason = engine.unavailable_reason(task)
    if reason is not None:
        raise RequestError(reason)
    if task.script is None:
        check_data(task)
    return task


def restart_for(engines: Iterable[str], argv: Sequence[str]) -> None:
    """Start this process's command again in the environment of an engine whose packages lack here.

    A comparison runs as a whole in one environment, so that all its rows have the same torch.
    Nothing happens where the process's own command line is another, as in a notebook: the engine is
    refused then.

    Args:
        engines: names of the engines that are asked for.
        argv: the arguments that ask for them.
    """
    for name in engines:
        other_environment.restart(name, plugins.load("engines", name).other_python(), argv)


def check_data(task: TaskConfig) -> None:
    """Check that the task's data exists.

    Raises:
        RequestError: it does not.
    """
    source_name, location = config.data_name(task.data)
    plugins.load("data", source_name).check(location)


def check_kind(task: TaskConfig) -> None:
    """Check that the task's data is of the kind that its model takes.

    Raises:
        RequestError: it is not, or there is no such model.
    """
    spec = models.of_task(task)
    source_name, _ = config.data_name(task.data)
    source_kind = plugins.load("data", source_name).gives
    model_kind = getattr(spec, "takes", models.IMAGES)
    if source_kind is None or model_kind == source_kind:
        return
    matching_sources = [
        n for n, s in plugins.classes("data").items() if s.gives in (model_kind, None)
    ]
    raise RequestError(
        f"--model {task.model} takes {model_kind}, and --data {source_name} gives {source_kind}; "
        f"use --data {' or '.join(matching_sources)}"
    )


def apply_defaults(task: TaskConfig, device: Any) -> TaskConfig:
    """Return the task for this device with defaults applied and its flags checked for conflicts.

    Args:
        task: the task as its flags give it.
        device: cpu, cuda or tpu.

    Raises:
        RequestError: flags contradict each other, or name something that does not exist.
    """
    has_several_nodes = task.nnodes != TaskConfig.nnodes
    if task.launcher in ("local", "elastic"):  # one thing, with a rendezvous where it needs one
        task = dataclasses.replace(task, launcher="elastic" if has_several_nodes else "local")
    problem = plugins.load("launchers", task.launcher).problem(task)
    if problem is not None:
        raise RequestError(problem)
    task = plugins.load("engines", task.engine).with_current_flags(task)
    cores_per_worker = max(1, cgroups.num_cores() // task.nproc_per_node)
    task = dataclasses.replace(
        task,
        device=device,
        amp_level=config.amp_level(task),
        amp_dtype=task.amp_dtype or ("float16" if device == "cuda" else "bfloat16"),
        threads=task.threads or cores_per_worker,
    )
    if task.script is not None:
        return _resolve_script(task)
    plugins.load("data", config.data_name(task.data)[0])
    plugins.load("optimizers", task.optimizer)
    check_kind(task)
    num_devices = config.devices_per_worker(task)
    workers = num_devices * max(1, min(8, cores_per_worker // num_devices))
    task = dataclasses.replace(
        task,
        batch_size=task.batch_size or (8 if device == "cpu" else 128),
        workers=workers if task.workers is None else task.workers,
    )
    assert task.batch_size is not None
    if task.batch_size % task.accumulate:
        raise RequestError(
            f"--batch_size {task.batch_size} cannot be cut into --accumulate {task.accumulate} "
            "equal parts"
        )
    if task.tf32 == "on" and device != "cuda":
        raise RequestError(
            f"--tf32 on: TF32 is a type of NVIDIA GPUs, not of --device {device}; leave it out"
        )
    if task.nesterov and not task.momentum:
        raise RequestError("--nesterov needs a --momentum above 0")
    if task.resume == "auto" and task.output_dir is None:
        raise RequestError("--resume auto looks for checkpoints in --output_dir; name that too")
    if not task.save_interval and (task.save_steps is not None or task.on_nan == "rollback"):
        flag = "--save_steps" if task.save_steps is not None else "--on_nan rollback"
        raise RequestError(f"{flag} needs checkpoints, and --save_interval 0 makes none")
    return task


def _resolve_script(task: TaskConfig) -> TaskConfig:
    """Return the task of a script, with an absolute path and without checkpoints.

    Raises:
        RequestError: there is no such script, or its arguments cannot be split.
    """
    assert task.script is not None
    path = Path(task.script)
    if not path.is_file():
        raise RequestError(f"--script {path}: there is no such file")
    try:
        shlex.split(task.script_args)
    except ValueError as error:
        raise RequestError(f"--script_args {task.script_args!r}: {error}") from None
    return dataclasses.replace(task, script=str(path.absolute()), save_interval=0)
