"""A user's optimizer, whose `step` is an engine's, and else what it was."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError

Names = dict[int, str]


def names_of(model: nn.Module) -> Names:
    """Parameter, by its identity -> its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def check(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Look whether the optimizer is one of the model's.

    Raises:
        RequestError: it has parameters that are not the model's, or no `step` of its class.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RequestError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's: build it from model.parameters(), with all that trains in model"
                )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise RequestError("the optimizer's step was replaced; give accelerate the optimizer first")


def take_over(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Put the parameters that the model has now in the places of those that it had.

    Groups stay the objects that they are. What the optimizer keeps of each parameter, from an
    earlier run for one, goes with it, laid out in memory as the parameter is.

    Args:
        names: of the parameters that the optimizer has.
    """
    parameters = dict(model.named_parameters())
    kept, groups = optimizer.state_dict(), optimizer.param_groups
    for group in groups:
        group["params"][:] = [parameters[names[id(p)]] for p in group["params"]]
    if not optimizer.state:
        return
    flat = [p for group in groups for p in group["params"]]
    for index, state in kept["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == flat[index].shape:
                # Fused AdamW goes through all of a parameter's tensors in one order.
                like = torch.empty_like(flat[index], device="cpu", dtype=value.dtype)
                state[key] = like.copy_(value)
    optimizer.state.clear()
    optimizer.load_state_dict(kept)
    optimizer.param_groups = groups


def accelerate(optimizer: torch.optim.Optimizer, take_step: Callable[[], None]) -> None:
    """Have `optimizer.step()` call `take_step`; see `plainly` for what that does.

    The object stays, of a subclass of its class, so that learning rate schedulers made before or
    after find it as they expect it.
    """
    kind: Any = type(optimizer)

    @functools.wraps(torch.optim.Optimizer.step)
    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise RequestError("optimizer.step(closure) cannot be accelerated: call it without one")
        take_step()

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks run in the step within
    of_scheduler = vars(optimizer).pop("step", None)
    accelerated = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    optimizer.__class__ = accelerated
    if of_scheduler is not None:  # which counts the steps at the method that it replaced

        @functools.wraps(of_scheduler)
        def counted(*args: Any, **kwargs: Any) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            step(optimizer, *args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        vars(optimizer)["step"] = counted


def plainly(optimizer: Any, engine: LoopEngine) -> None:
    """The engine's step, by the optimizer as it was before `accelerate`."""
    accelerated, counted = type(optimizer), vars(optimizer).pop("step", None)
    optimizer.__class__ = accelerated.__base__
    try:
        engine.step_optimizer(optimizer)
    finally:
        optimizer.__class__ = accelerated
        if counted is not None:
            vars(optimizer)["step"] = counted
