"""`accbench.accelerate`: a training loop of a user's own, through any engine."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from accbench import config
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.recording.terminal import log
from accbench.training import alone, current
from accbench.training.accelerated_run import Run

# Flags that are for a launcher, or that say themselves what the script is.
_LAUNCHERS = ("nproc_per_node", "launcher", "script", "script_args", "config")


def accelerate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: Any, sharded: bool = False,
    **flags: Any,
) -> Run:  # fmt: skip
    """Have an ordinary training loop train through an engine, timed and recorded as a run is.

    ::

        run = accbench.accelerate(model, optimizer, loader, engine="xla")
        model, optimizer, loader = run
        for inputs, targets in loader:
            optimizer.zero_grad()
            run.backward(criterion(model(inputs), targets))
            optimizer.step()

    Model and optimizer stay the objects that they are, with their attributes, the names of their
    parameters and their schedulers; a step of the optimizer is one step, on however many workers.

    Args:
        model: on the host; the optimizer's parameters are its own.
        optimizer: any of torch's; under XLA, AdamW, Adam and SGD never wait for the host.
        loaders: the training loader first. Each a DataLoader, or an iterable of tensors in any
            nesting. On several workers a DataLoader gets a sampler that shares its samples out.
        sharded: each worker's loaders give samples of its own already.
        flags: those of a run by their names, such as engine, amp_level, device, max_steps,
            log_interval, output_dir; an engine's options as a mapping: ddp={"channels_last":
            False}. They count where the script is started by itself or by torchrun; a launcher
            (`accbench run --script`) has flags of its own.

    Raises:
        RequestError: it cannot be done; the message says why and what to do.
    """
    _check(model, optimizer, flags)
    worker = current.worker()
    if worker is None:
        worker = alone.start(flags)
    else:
        _tell_overruled(worker.task, flags)
    if worker.run is not None:
        raise RequestError(
            "accbench.accelerate was called before in this run: one run trains one model"
        )
    try:
        run = Run(worker, model, optimizer, loaders, sharded)
    except BaseException:
        alone.give_up(worker)
        raise
    worker.run = run
    alone.watch(worker)
    return run


def _check(model: Any, optimizer: Any, flags: Mapping[str, Any]) -> None:
    for what, kind, given in (
        ("model", nn.Module, model), ("optimizer", torch.optim.Optimizer, optimizer),
    ):  # fmt: skip
        if not isinstance(given, kind):
            raise RequestError(
                f"accelerate(model, optimizer, loader, ...): the {what} is a "
                f"{type(given).__name__}, not a {kind.__module__.split('.')[0]} {kind.__name__}"
            )
    known = {field.name for field in fields(TaskConfig)} - {"options"}
    for name, value in flags.items():
        if name in config.SCRIPTS_OWN or name in _LAUNCHERS:
            why = "a launcher's" if name in _LAUNCHERS else "the script's own to decide"
            raise RequestError(f"accelerate has no keyword {name}: that is {why}")
        if name not in known and not isinstance(value, Mapping):
            near = difflib.get_close_matches(name, known - {*config.SCRIPTS_OWN, *_LAUNCHERS}, 1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise RequestError(f"accelerate has no keyword {name}{hint}")


def _tell_overruled(task: TaskConfig, flags: Mapping[str, Any]) -> None:
    """What the script asks for and the launcher does otherwise."""
    for name, value in flags.items():
        own = getattr(task, name, None)
        if not isinstance(value, Mapping) and own != value:
            log.info(f"--{name} {own} counts, the launcher's; the script has {name}={value!r}")
