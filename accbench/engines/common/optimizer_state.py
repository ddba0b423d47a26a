"""Optimizers as a task asks for them, in all engines: parameter groups, state and averages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig
from accbench.engines import optimizers
from accbench.engines.common.training_state import Tensors, TrainingState

# State key, in addition to `Optimizer.state_keys`: the parameter's exponential moving average.
AVERAGE = "average"


def decays(task: TaskConfig, parameter: torch.Tensor) -> bool:
    """Return whether `--weight_decay` applies to a parameter."""
    return task.decay == "all" or parameter.dim() > 1


def groups(task: TaskConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups; parameters without weight decay have a group of their own."""
    parameters = list(model.parameters())
    split: list[dict[str, Any]] = [
        {"params": [p for p in parameters if decays(task, p)]},
        {"params": [p for p in parameters if not decays(task, p)], "weight_decay": 0.0},
    ]
    return [group for group in split if group["params"]]


def make_state(
    task: TaskConfig,
    optimizer: torch.optim.Optimizer,
    zeros_like: Callable[[torch.Tensor], torch.Tensor],
    copy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Create every parameter's state before the first step, which is then like all others.

    Args:
        task: names the optimizer.
        optimizer: whose state is filled.
        zeros_like: makes zeros on a tensor's device, with its memory layout.
        copy: copies a tensor on its device, with its memory layout.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scalar = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state = {key: zeros_like(parameter) for key in optimizers.of_task(task).state_keys}
            if task.ema_decay:
                state[AVERAGE] = copy(parameter.detach())
            optimizer.state[parameter] = {"step": zeros_like(scalar), **state}
    if task.ema_decay:
        optimizer.register_step_post_hook(_UpdateAverages(task.ema_decay))


class _UpdateAverages:
    """Step hook that moves the averages towards the parameters."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            state[AVERAGE].lerp_(parameter, 1 - self.decay)


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer that counts no steps count those that were not skipped."""
    optimizer.register_step_post_hook(_count)


@torch.no_grad()
def _count(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    # A GradScaler sets it on a fused optimizer for the duration of its step.
    found_inf = getattr(optimizer, "found_inf", None)
    for parameter, state in optimizer.state.items():
        if parameter.grad is not None:
            # With --offload the scaler's flag and the state are on different devices.
            is_taken = 1 if found_inf is None else 1 - found_inf.to(state["step"].device)
            state["step"] += is_taken


def averages(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return each parameter's moving average by its name, on the device."""
    return {
        name: optimizer.state[parameter][AVERAGE]
        for name, parameter in net.named_parameters()
        if AVERAGE in optimizer.state.get(parameter, {})
    }


def with_averages(task: TaskConfig, saved: TrainingState) -> TrainingState:
    """Return a state with averages if the task has them; missing ones start at the weights."""
    optimizer_state = {}
    for name, state in saved.optimizer.items():
        optimizer_state[name] = {key: tensor for key, tensor in state.items() if key != AVERAGE}
        if task.ema_decay:
            optimizer_state[name][AVERAGE] = state.get(AVERAGE, saved.model[name])
    return dataclasses.replace(saved, optimizer=optimizer_state)


def averaged_tensors(saved: TrainingState) -> Tensors:
    """Return the model's tensors, with averages in place of the parameters that have one."""
    averaged = {n: state[AVERAGE] for n, state in saved.optimizer.items() if AVERAGE in state}
    return {**saved.model, **averaged}


class AveragedModel(nn.Module):
    """A model that computes with the averages in place of its parameters; it writes nothing."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net = net
        self.tensors = averages(net, optimizer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.net, self.tensors, args, kwargs)
