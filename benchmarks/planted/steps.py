"""Errors in which steps are taken, on which batches, and engines that fail."""

import time
from typing import Any

import torch
from torch import nn

from accbench.engines.ddp import Engine
from benchmarks.planted.hooks import Planted


class Slowed(Engine):
    """Sleep a tenth of the time that each step took."""

    def compute_gradients(self, *args: Any) -> torch.Tensor:
        self._began = time.perf_counter()
        return super().compute_gradients(*args)

    def end_step(self) -> None:
        time.sleep(0.1 * (time.perf_counter() - self._began))


class Crashes(Engine):
    """Raise where the model is placed."""

    def prepare(self, model: nn.Module) -> nn.Module:
        raise RuntimeError("planted crash")


class Frozen(Engine):
    """Compute gradients and never apply them."""

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class CrashesWhenLoaded(Engine):
    """Train well, and raise where the numerics pass loads a state."""

    def load_training_state(self, *args: Any) -> None:
        raise OSError("planted crash")


class NotLoaded(Planted):
    """Ignore the state that is loaded."""

    def load_training_state(self, *args: Any) -> None:
        return


class SkipsThird(Planted):
    """Leave out the third step."""

    def apply_gradients(self, optimizer):
        if self.num_steps != 3:
            super().apply_gradients(optimizer)


class StopsAfterFive(Planted):
    """Apply no gradients after the fifth step."""

    def apply_gradients(self, optimizer):
        if self.num_steps <= 5:
            super().apply_gradients(optimizer)


class AppliesTwice(Planted):
    """Step the optimizer twice."""

    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        optimizer.step()


class SkipsWhenAlone(Planted):
    """Leave out every third step since a state was loaded."""

    def apply_gradients(self, optimizer):
        if self.since_load % 3:
            super().apply_gradients(optimizer)


class HalvedWhenAlone(Planted):
    """Halve the learning rate of steps before which no state was loaded."""

    def apply_gradients(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = self.task.lr * (0.5 if self.since_load > 1 else 1.0)
        super().apply_gradients(optimizer)


class WrongLabelsFromEight(Planted):
    """Shift the labels by one sample from the eighth step on."""

    def batch(self, batch):
        return (batch[0], batch[1].roll(1)) if self.num_steps >= 8 else batch


class BatchTwice(Planted):
    """Train on every other batch twice."""

    _before: Any = None

    def batch(self, batch):
        used = self._before if self.num_steps % 2 == 0 else batch
        self._before = batch
        return used


class Mirrored(Planted):
    """Flip the images."""

    def batch(self, batch):
        return (batch[0].flip(3), batch[1])
