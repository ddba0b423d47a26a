"""A user's optimizer whose `step` is the engine's."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.distributed.whole_tensors import is_sharded
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError

Names = dict[int, str]


def names_by_id(model: nn.Module) -> Names:
    """Map each parameter's `id` to its first name in the model."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def check(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Check that the optimizer's parameters are the model's and its `step` is its class's.

    Raises:
        RequestError: it has parameters that are not the model's, or its `step` was replaced.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RequestError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's: build it from model.parameters(), with all that trains in model"
                )
    replaced_step = vars(optimizer).get("step")
    if replaced_step is not None and not hasattr(replaced_step, "_wrapped_by_lr_sched"):
        raise RequestError("the optimizer's step was replaced; give accelerate the optimizer first")


def check_steps_with_shards(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer can step with parameters in shards (DTensor).

    Raises:
        RequestError: it is fused, and torch has no form for shards of it.
    """
    has_form = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    if not has_form and any(group.get("fused") for group in optimizer.param_groups):
        raise RequestError(
            f"{type(optimizer).__name__}(fused=True) cannot step with the shards of --dp_shard; "
            "leave fused out, or use AdamW"
        )


def replace_parameters(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Replace the optimizer's parameters by those that the model has now.

    Groups stay the same objects. The optimizer's state of each parameter, for example from an
    earlier run, is kept, laid out in memory as the parameter is.

    Args:
        optimizer: changed in place.
        names: `id` -> name of the parameters that the optimizer has.
        model: the model with the new parameters.
    """
    parameters = dict(model.named_parameters())
    state_dict, groups = optimizer.state_dict(), optimizer.param_groups
    for group in groups:
        group["params"][:] = [parameters[names[id(p)]] for p in group["params"]]
    if not optimizer.state:
        return
    flat = [p for group in groups for p in group["params"]]
    for index, state in state_dict["state"].items():
        if is_sharded(flat[index]):  # its optimizer cuts what it loads
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == flat[index].shape:
                # Fused AdamW reads all of a parameter's tensors in the same memory order.
                like = torch.empty_like(flat[index], device="cpu", dtype=value.dtype)
                state[key] = like.copy_(value)
    optimizer.state.clear()
    optimizer.load_state_dict(state_dict)
    optimizer.param_groups = groups


def accelerate(optimizer: torch.optim.Optimizer, take_step: Callable[[], None]) -> None:
    """Make `optimizer.step()` call `take_step`; `step_unaccelerated` then does the step.

    The object stays the same, of a subclass of its class, so that learning rate schedulers made
    before or after find what they expect.
    """
    kind: Any = type(optimizer)

    @functools.wraps(torch.optim.Optimizer.step)
    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise RequestError("optimizer.step(closure) cannot be accelerated: call it without one")
        take_step()

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks run in the step within
    scheduler_step = vars(optimizer).pop("step", None)
    accelerated = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    optimizer.__class__ = accelerated
    if scheduler_step is not None:  # the scheduler counts steps at the method that it replaced

        @functools.wraps(scheduler_step)
        def counted(*args: Any, **kwargs: Any) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            step(optimizer, *args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        vars(optimizer)["step"] = counted


def step_unaccelerated(optimizer: Any, engine: LoopEngine) -> None:
    """Step as the optimizer did before `accelerate`, through the engine."""
    accelerated, counted = type(optimizer), vars(optimizer).pop("step", None)
    optimizer.__class__ = accelerated.__base__
    try:
        engine.step_optimizer(optimizer)
    finally:
        optimizer.__class__ = accelerated
        if counted is not None:
            vars(optimizer)["step"] = counted
