"""BatchNorm's running variance, which torch_xla 2.8 leaves biased.

PyTorch keeps the variance with Bessel's correction, n / (n - 1) of the batch's own,
for n values a channel (see `torch.nn.BatchNorm2d`). torch_xla keeps the batch's own:
3 % too little where a late layer has 32 values, and evaluation then sees it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def track_unbiased_variance(model: nn.Module) -> None:
    """Have the BatchNorm layers of `model` track the unbiased variance.

    A forward pass gets zeros as the running variance, (C,), so that momentum times the
    batch's own is left in them; corrected, that goes into the layer's own. Layers whose
    average is cumulative (momentum None) stay as they are.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum and module.track_running_stats:
            module.register_forward_pre_hook(_lend_zeros)
            # Also after an error, or the layer would lose its buffer.
            module.register_forward_hook(_take_back, always_call=True)


def _lend_zeros(module: Any, _inputs: tuple[torch.Tensor, ...]) -> None:
    if module.training:
        module._own_running_var = module.running_var
        module._buffers["running_var"] = torch.zeros_like(module.running_var)


@torch.no_grad()
def _take_back(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    own = module.__dict__.pop("_own_running_var", None)
    if own is None:
        return
    added = module.running_var
    module._buffers["running_var"] = own
    if output is None:  # the forward pass failed
        return
    num_values = inputs[0].numel() // inputs[0].shape[1]
    correction = num_values / (num_values - 1) if num_values > 1 else 1.0
    own.mul_(1 - module.momentum).add_(added, alpha=correction)
