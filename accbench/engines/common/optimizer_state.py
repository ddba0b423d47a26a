"""The optimizers that a task may ask for, the same for all engines: arguments, state, average."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig
from accbench.engines import optimizers
from accbench.engines.common.training_state import Tensors, TrainingState

# Beside `Optimizer.state_keys`: the exponential moving average of the parameter itself.
AVERAGE = "average"


def decays(task: TaskConfig, parameter: torch.Tensor) -> bool:
    """Whether `--weight_decay` is for this parameter."""
    return task.decay == "all" or parameter.dim() > 1


def groups(task: TaskConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The model's parameters, those without weight decay in a group of their own."""
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
    """Give every parameter its state before the first step, which then is like every other.

    Args:
        zeros_like, copy: of a tensor, on its device and laid out in memory as it is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scalar = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state = {key: zeros_like(parameter) for key in optimizers.of_task(task).state_keys}
            if task.ema_decay:
                state[AVERAGE] = copy(parameter.detach())
            optimizer.state[parameter] = {"step": zeros_like(scalar), **state}
    if task.ema_decay:
        optimizer.register_step_post_hook(_Average(task.ema_decay))


class _Average:
    """Moves the averages towards the parameters after each step."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            state[AVERAGE].lerp_(parameter, 1 - self.decay)


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's SGD count the steps that were not skipped, as others do by themselves."""
    optimizer.register_step_post_hook(_count)


@torch.no_grad()
def _count(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    # What a GradScaler gives a fused optimizer for the time of its step.
    found_inf = getattr(optimizer, "found_inf", None)
    for parameter, state in optimizer.state.items():
        if parameter.grad is not None:
            state["step"] += 1 if found_inf is None else 1 - found_inf


def averages(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameter -> its moving average, on the device."""
    return {
        name: optimizer.state[parameter][AVERAGE]
        for name, parameter in net.named_parameters()
        if AVERAGE in optimizer.state.get(parameter, {})
    }


def with_averages(task: TaskConfig, saved: TrainingState) -> TrainingState:
    """A state with averages or without, as the task has them; new ones begin at the weights."""
    of_parameters = {}
    for name, kept in saved.optimizer.items():
        of_parameters[name] = {key: tensor for key, tensor in kept.items() if key != AVERAGE}
        if task.ema_decay:
            of_parameters[name][AVERAGE] = kept.get(AVERAGE, saved.model[name])
    return dataclasses.replace(saved, optimizer=of_parameters)


def of_averages(saved: TrainingState) -> Tensors:
    """The model's tensors with the averages in place of the parameters that have one."""
    averaged = {n: kept[AVERAGE] for n, kept in saved.optimizer.items() if AVERAGE in kept}
    return {**saved.model, **averaged}


class Averaged(nn.Module):
    """A model with the averages in place of its parameters; nothing is written anywhere."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net = net
        self.tensors = averages(net, optimizer)

    def forward(self, *args: Any) -> Any:
        return torch.func.functional_call(self.net, self.tensors, args)
