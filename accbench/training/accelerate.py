"""`accbench.accelerate`: train a user's own loop through any engine."""

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
from accbench.training import current, standalone
from accbench.training.accelerated_run import Run

# Flags of a launcher, or flags that name the script.
_LAUNCHERS = ("nproc_per_node", "launcher", "script", "script_args", "config")


def accelerate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: Any, sharded: bool = False,
    **flags: Any,
) -> Run:  # fmt: skip
    """Train an ordinary training loop through an engine, timed and recorded as a run is.

    ::

        run = accbench.accelerate(model, optimizer, loader, engine="xla")
        model, optimizer, loader = run
        for inputs, targets in loader:
            optimizer.zero_grad()
            run.backward(criterion(model(inputs), targets))
            optimizer.step()

    Model and optimizer stay the same objects, with their attributes, parameter names and
    schedulers; a step of the optimizer is one step, on however many workers.

    Args:
        model: on the host; the optimizer's parameters must be its parameters.
        optimizer: any optimizer of torch's; under XLA, AdamW, Adam and SGD never wait for the host.
        loaders: the training loader first. Each is a DataLoader, or an iterable of tensors in any
            nesting. On several workers a DataLoader gets a sampler that shards its samples.
        sharded: whether each worker's loaders already give samples of its own.
        flags: the flags of a run by name, such as engine, amp_level, device, max_steps,
            log_interval, output_dir; an engine's options as a mapping: ddp={"channels_last":
            False}. They apply where the script is started directly or by torchrun; with a launcher
            (`accbench run --script`) the launcher's flags apply.

    Raises:
        RequestError: the request cannot be met; the message says why and what to do.
    """
    _check(model, optimizer, flags)
    worker = current.worker()
    if worker is None:
        worker = standalone.start(flags)
    else:
        _log_overruled(worker.task, flags)
    if worker.run is not None:
        raise RequestError(
            "accbench.accelerate was called before in this run: one run trains one model"
        )
    try:
        run = Run(worker, model, optimizer, loaders, sharded)
    except BaseException:
        standalone.give_up(worker)
        raise
    worker.run = run
    standalone.watch(worker)
    return run


def _check(model: Any, optimizer: Any, flags: Mapping[str, Any]) -> None:
    for what, kind, argument in (
        ("model", nn.Module, model), ("optimizer", torch.optim.Optimizer, optimizer),
    ):  # fmt: skip
        if not isinstance(argument, kind):
            raise RequestError(
                f"accelerate(model, optimizer, loader, ...): the {what} is a "
                f"{type(argument).__name__}, not a {kind.__module__.split('.')[0]} {kind.__name__}"
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


def _log_overruled(task: TaskConfig, flags: Mapping[str, Any]) -> None:
    """Log the flags of the script that the launcher's flags override."""
    for name, value in flags.items():
        launchers = getattr(task, name, None)
        if not isinstance(value, Mapping) and launchers != value:
            log.info(
                f"--{name} {launchers} counts, the launcher's; the script has {name}={value!r}"
            )
