"""BatchNorm's cumulative averages (momentum None), without waiting for the device.

In torch the layer reads the count of batches into Python to divide by it: each step would wait, and
compile another graph. Here the layer gets a momentum of 1 and buffers that it fills with the
batch's own statistics, which the device then adds to the average.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STATISTICS = ("running_mean", "running_var")


def average_cumulatively(model: nn.Module) -> None:
    """Have the layers whose momentum is None divide by their batch count on the device."""
    for module in model.modules():
        tracks = isinstance(module, _BatchNorm) and module.track_running_stats
        if tracks and module.momentum is None:
            module.register_forward_pre_hook(_use_batch_buffers)
            # Also after an error: the layer would lose its buffers otherwise.
            module.register_forward_hook(_update_averages, always_call=True)


@torch.no_grad()
def _use_batch_buffers(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    if not module.training:
        return
    module._averaged_statistics = {name: module._buffers[name] for name in _STATISTICS}
    for name, buffer in module._averaged_statistics.items():
        module._buffers[name] = torch.zeros_like(buffer)
    module.momentum = 1.0


@torch.no_grad()
def _update_averages(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    averages = module.__dict__.pop("_averaged_statistics", None)
    if averages is None:
        return
    batch_statistics = {name: module._buffers[name] for name in _STATISTICS}
    module._buffers.update(averages)
    module.momentum = None
    if output is None:  # the forward pass failed
        return
    count = module.num_batches_tracked.to(averages["running_var"].dtype)  # counts this batch
    for name, tensor in averages.items():
        tensor.add_((batch_statistics[name] - tensor) / count)
