"""Errors in the gradients of one worker."""

from typing import Any

import torch
from torch import nn

from benchmarks.planted.hooks import Planted


def scaled(factor: float) -> type:
    """Return an engine whose gradients are `factor` times their size."""

    class Scaled(Planted):
        def change(self, parameters):
            for parameter in parameters:
                parameter.grad.mul_(factor)

    return Scaled


class OneTensorScaled(Planted):
    """Scale the gradient of the largest parameter by 0.8."""

    def change(self, parameters):
        max(parameters, key=torch.Tensor.numel).grad.mul_(0.8)


class OneTensorTurned(Planted):
    """Negate the gradient of one parameter."""

    def change(self, parameters):
        parameters[len(parameters) // 2].grad.neg_()


class BiasesDropped(Planted):
    """Zero the gradients of vectors."""

    def change(self, parameters):
        for parameter in parameters:
            if parameter.dim() == 1:
                parameter.grad.zero_()


class Stale(Planted):
    """Apply the gradients of the step before."""

    _before: Any = None

    def change(self, parameters):
        now = [parameter.grad.clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, self._before or now, strict=True):
            parameter.grad.copy_(gradient)
        self._before = now


class NeverZeroed(Planted):
    """Add each step's gradients to those of the steps before."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.zero_grad = lambda set_to_none=True: None
        return optimizer


class Clipped(Planted):
    """Clip the gradients' norm although no flag asks for it."""

    def change(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 0.5)


class Noisy(Planted):
    """Multiply gradients by random noise of 10 %."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(1 + 0.1 * torch.randn_like(parameter.grad))


class Compressed(Planted):
    """Round gradients to bfloat16."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.copy_(parameter.grad.bfloat16())
