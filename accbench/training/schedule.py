"""The learning rate over a run: linear warm-up, then constant, cosine, linear or steps."""

import math
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR

from accbench.config import TaskConfig


def factor(task: TaskConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """What `--lr` is multiplied by in the optimizer step after `step` others.

    The warm-up is that of Goyal et al., Accurate, Large Minibatch SGD, 2017, a step at a time;
    the cosine that of Loshchilov and Hutter, SGDR, 2016, without restarts.
    """
    warmup = task.lr_warmup_epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / (warmup + 1)  # never 0, which XLA would write into another graph
    part = min(1.0, (step - warmup) / max(1.0, num_steps - warmup))
    if task.lr_schedule == "cosine":
        return task.lr_final + (1 - task.lr_final) * (1 + math.cos(math.pi * part)) / 2
    if task.lr_schedule == "linear":
        return task.lr_final + (1 - task.lr_final) * (1 - part)
    if task.lr_schedule == "step":
        return float(task.lr_step_factor ** (step // (task.lr_step_epochs * steps_per_epoch)))
    return 1.0


class Schedule:
    """Sets the rate for each step by torch's `LambdaLR`; all of its state is the step.

    Args:
        step: optimizer steps done.
        num_steps: of the whole run.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, task: TaskConfig, steps_per_epoch: int,
        num_steps: int, step: int,
    ) -> None:  # fmt: skip
        self._torchs: LambdaLR | None = None
        if task.lr_schedule == "constant" and not task.lr_warmup_epochs:
            return
        for group in optimizer.param_groups:
            group["initial_lr"] = task.lr
        self._torchs = LambdaLR(
            optimizer,
            lambda done: factor(task, done, steps_per_epoch, num_steps),
            last_epoch=step - 1,
        )

    def step(self) -> None:
        """Go on to the next step's rate."""
        if self._torchs is None:
            return
        with warnings.catch_warnings():
            # An engine that replays a step does not call the optimizer, which torch takes for
            # a wrong order.
            warnings.simplefilter("ignore", UserWarning)
            self._torchs.step()
