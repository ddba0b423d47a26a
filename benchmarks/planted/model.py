"""Errors in the loss, in layers and in dropout."""

import dataclasses
from typing import Any

import torch
from torch import nn

from benchmarks.planted.hooks import Planted


@dataclasses.dataclass
class _OtherLoss:
    spec: Any
    smoothing: float = 0.0
    num_left_out: int = 0

    def loss(self, model, batch):
        if self.num_left_out:
            batch = tuple(tensor[: -self.num_left_out] for tensor in batch)
        if not self.smoothing:
            return self.spec.loss(model, batch)
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1], label_smoothing=self.smoothing)


class Smoothed(Planted):
    """Smooth labels although no flag asks for it."""

    def spec(self, spec):
        return _OtherLoss(spec, smoothing=0.1)


class LastSampleLeftOut(Planted):
    """Leave the last sample out of the loss."""

    def spec(self, spec):
        return _OtherLoss(spec, num_left_out=1)


def of_batchnorm(**settings: Any) -> type:
    """Return an engine whose BatchNorms have other settings."""

    class OfBatchNorm(Planted):
        def module(self, module):
            if isinstance(module, nn.BatchNorm2d):
                for name, value in settings.items():
                    setattr(module, name, value)

    return OfBatchNorm


class Leaky(Planted):
    """Replace ReLU by LeakyReLU."""

    def module(self, module):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.LeakyReLU(0.01))


class Brighter(Planted):
    """Scale images by half a per cent too much."""

    def module(self, module):
        if hasattr(module, "scale"):
            module.scale.mul_(1.005)


class EvaluatesInTrainingMode(Planted):
    """Leave the model in training mode during evaluation."""

    def prepare(self, model):
        prepared = super().prepare(model)
        prepared.eval = prepared.train
        return prepared


def dropping(factor: float) -> type:
    """Return an engine whose dropout has `factor` times its probability."""

    class Dropping(Planted):
        def module(self, module):
            if isinstance(module, nn.Dropout):
                module.p *= factor

    return Dropping


class DropsTheSame(Planted):
    """Draw the same dropout mask in each step."""

    def run_step(self, *args):
        torch.manual_seed(self.topology.rank)
        return super().run_step(*args)


class DropsTheSameOnAllRanks(Planted):
    """Draw the same dropout mask on all ranks."""

    def run_step(self, *args):
        torch.manual_seed(self.num_steps)
        return super().run_step(*args)
