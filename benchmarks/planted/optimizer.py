"""Errors in the optimizer, in weights and in what a recipe asks for."""

import dataclasses
from typing import Any

import torch

from benchmarks.planted.hooks import Planted

_OF_AMSGRAD = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def with_options(**options: Any) -> type:
    """Return an engine whose optimizer has other options."""

    class WithOptions(Planted):
        def build_optimizer(self, model):
            optimizer = super().build_optimizer(model)
            for group in optimizer.param_groups:
                group.update(options)
                for parameter in group["params"] if options.get("amsgrad") else ():
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        **{name: torch.zeros_like(parameter) for name in _OF_AMSGRAD},
                    }
            return optimizer

    return WithOptions


class RateOff(Planted):
    """Train with a learning rate that is 1 % too large."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer


class Coupled(Planted):
    """Apply Adam's L2 penalty in place of AdamW's decay."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.add_(parameter.detach(), alpha=self.task.weight_decay)


class Rounded(Planted):
    """Keep weights in bfloat16."""

    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())


class FirstFrozen(Planted):
    """Freeze the first parameter."""

    def prepare(self, model):
        next(model.parameters()).requires_grad_(False)
        return super().prepare(model)


def of_another_task(**changes: Any) -> type:
    """Return an engine that trains as if other flags had been given."""

    class OfAnotherTask(Planted):
        def __init__(self, task, *others):
            super().__init__(dataclasses.replace(task, **changes), *others)

    return OfAnotherTask


class AverageLeftOut(Planted):
    """Never update the averaged weights."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer._optimizer_step_post_hooks.clear()
        return optimizer


class FirstPartLeftOut(Planted):
    """Overwrite the gradients of a step's micro-batches instead of adding them up."""

    num_parts = 0

    def backward(self, loss):
        self.num_parts += 1
        super().backward(loss * (self.num_parts % self.task.accumulate == 0))
