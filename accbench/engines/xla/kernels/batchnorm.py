"""BatchNorm's cumulative averages (momentum None), without asking the host.

There torch reads the count of batches into Python to divide by it: every step would wait, and be
another graph. Here the layer gets a momentum of 1 and buffers that it fills with the batch's own
statistics, which the device then adds to the average.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STATISTICS = ("running_mean", "running_var")


def average_cumulatively(model: nn.Module) -> None:
    """Have the layers of `model` whose momentum is None divide by their count on the device."""
    for module in model.modules():
        tracks = isinstance(module, _BatchNorm) and module.track_running_stats
        if tracks and module.momentum is None:
            module.register_forward_pre_hook(_lend_for_one_batch)
            # Also after an error, or the layer would lose its buffers.
            module.register_forward_hook(_average, always_call=True)


@torch.no_grad()
def _lend_for_one_batch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    if not module.training:
        return
    module._own_statistics = {name: module._buffers[name] for name in _STATISTICS}
    for name, own in module._own_statistics.items():
        module._buffers[name] = torch.zeros_like(own)
    module.momentum = 1.0


@torch.no_grad()
def _average(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    own = module.__dict__.pop("_own_statistics", None)
    if own is None:
        return
    of_batch = {name: module._buffers[name] for name in _STATISTICS}
    module._buffers.update(own)
    module.momentum = None
    if output is None:  # the forward pass failed
        return
    count = module.num_batches_tracked.to(own["running_var"].dtype)  # this batch is in it
    for name, tensor in own.items():
        tensor.add_((of_batch[name] - tensor) / count)
