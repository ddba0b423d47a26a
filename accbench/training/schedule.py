"""The learning rate over a run: linear warm-up, then constant, cosine, linear or steps."""

import math
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR

from accbench.config import TaskConfig


def factor(task: TaskConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """Compute the factor of `--lr` for the optimizer step after `step` others.

    The warm-up is that of Goyal et al., Accurate, Large Minibatch SGD, 2017, a step at a time;
    the cosine schedule is that of Loshchilov and Hutter, SGDR, 2016, without restarts.
    """
    warmup = task.lr_warmup_epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / (warmup + 1)  # never 0, for which XLA would compile another graph
    progress = min(1.0, (step - warmup) / max(1.0, num_steps - warmup))
    if task.lr_schedule == "cosine":
        return task.lr_final + (1 - task.lr_final) * (1 + math.cos(math.pi * progress)) / 2
    if task.lr_schedule == "linear":
        return task.lr_final + (1 - task.lr_final) * (1 - progress)
    if task.lr_schedule == "step":
        return float(task.lr_step_factor ** (step // (task.lr_step_epochs * steps_per_epoch)))
    return 1.0


class Schedule:
    """A learning rate schedule that torch's `LambdaLR` sets; its only state is the step.

    Args:
        optimizer: its groups get the rate.
        task: the task.
        steps_per_epoch: optimizer steps of an epoch.
        num_steps: optimizer steps of the whole run.
        step: optimizer steps done, as the schedule counts them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, task: TaskConfig, steps_per_epoch: int,
        num_steps: int, step: int,
    ) -> None:  # fmt: skip
        self._scheduler: LambdaLR | None = None
        if task.lr_schedule == "constant" and not task.lr_warmup_epochs:
            return
        for group in optimizer.param_groups:
            group["initial_lr"] = task.lr
        self._scheduler = LambdaLR(
            optimizer,
            lambda done: factor(task, done, steps_per_epoch, num_steps),
            last_epoch=step - 1,
        )

    def step(self) -> None:
        """Set the next step's learning rate."""
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            # An engine that replays a step does not call the optimizer, and torch then warns of a
            # wrong order.
            warnings.simplefilter("ignore", UserWarning)
            self._scheduler.step()
