"""Errors in what several ranks exchange."""

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.planted.hooks import Planted


class NotAveraged(Planted):
    """Keep each rank's own gradients; the check of reduction at the start still passes."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)


class Summed(Planted):
    """Sum gradients over ranks in place of averaging them."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(self.topology.world_size)


class OwnReduction(NotAveraged):
    """Average gradients tensor by tensor, so that subclasses can change some of them."""

    def change(self, parameters):
        for index, parameter in enumerate(parameters):
            self.reduce(index / len(parameters), parameter.grad)

    def reduce(self, position: float, gradient: torch.Tensor) -> None:
        """Average one gradient; `position` is its parameter's, from 0 to 1."""
        dist.all_reduce(gradient)
        gradient /= self.topology.world_size


class BucketLeftOut(OwnReduction):
    """Leave a fifth of the parameters out of the reduction."""

    def reduce(self, position, gradient):
        if not 0.5 <= position < 0.7:
            super().reduce(position, gradient)


class OnlyRank0(OwnReduction):
    """Give all ranks the gradients of rank 0."""

    def reduce(self, position, gradient):
        dist.broadcast(gradient, src=0)


class BucketOfRank0(OwnReduction):
    """Give all ranks rank 0's gradients of a fifth of the parameters."""

    def reduce(self, position, gradient):
        if 0.5 <= position < 0.7:
            dist.broadcast(gradient, src=0)
        else:
            super().reduce(position, gradient)


class SameData(Planted):
    """Train all ranks on rank 0's batch."""

    def batch(self, batch):
        batch = tuple(tensor.contiguous().clone() for tensor in batch)
        for tensor in batch:
            dist.broadcast(tensor, src=0)
        return batch


class StatisticsShared(Planted):
    """Average BatchNorm's statistics over the ranks."""

    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        for buffer in self._buffers:
            dist.all_reduce(buffer)
            buffer /= self.topology.world_size

    def prepare(self, model):
        prepared = super().prepare(model)
        self._buffers = [b for n, b in prepared.named_buffers() if "running" in n]
        return prepared


class MeanOfMeans(Planted):
    """Weigh the means of all parts of a step alike, however many labels they have."""

    def batch(self, batch):
        return {key: batch[key] for key in ("input_ids", "labels")}
