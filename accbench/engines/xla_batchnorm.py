"""BatchNorm's running variance, which torch_xla 2.8 leaves biased.

PyTorch keeps the variance with Bessel's correction, n / (n - 1) of the batch's own,
for n values a channel (see `torch.nn.BatchNorm2d`). torch_xla keeps the batch's own:
3 % too little where a late layer has 32 values, and evaluation then sees it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def correct_running_variance(model: nn.Module) -> None:
    """Have every BatchNorm of `model` keep the variance as PyTorch does."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum and module.running_var is not None:
            module.register_forward_pre_hook(_keep_variance)
            module.register_forward_hook(_correct_variance)


def _keep_variance(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    if module.training:
        # A copy: the forward pass writes in place.
        module._variance_before = module.running_var.detach().clone()


def _correct_variance(module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
    if not module.training:
        return
    num_values = inputs[0].numel() // inputs[0].shape[1]
    if num_values < 2:
        return
    with torch.no_grad():
        # running = (1 - m) * before + m * biased; what m added grows by 1 / (n - 1).
        added = module.running_var - (1 - module.momentum) * module._variance_before
        # As data: autograd holds the buffer, though in training its gradient needs it not.
        module.running_var.data.add_(added / (num_values - 1))
    del module._variance_before
