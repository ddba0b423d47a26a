"""BatchNorm's running variance, which torch_xla 2.8 leaves biased.

PyTorch keeps the variance with Bessel's correction, n / (n - 1) of the batch's own,
for n values a channel (see `torch.nn.BatchNorm2d`). torch_xla keeps the batch's own:
3 % too little where a late layer has 32 values, and evaluation then sees it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class VarianceCorrection:
    """What is missing in the running variances of a model, added after each backward pass.

    Not in the forward pass: autograd holds the buffers until the backward pass is done.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[nn.Module, torch.Tensor] = {}
        self._missing: dict[nn.Module, torch.Tensor] = {}
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.momentum and module.track_running_stats:
                module.register_forward_pre_hook(self._keep)
                module.register_forward_hook(self._note)

    @torch.no_grad()
    def _keep(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            # A copy: the forward pass writes in place.
            self._before[module] = module.running_var.clone()

    @torch.no_grad()
    def _note(self, module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        before = self._before.pop(module, None)
        num_values = inputs[0].numel() // inputs[0].shape[1]
        if before is None or num_values < 2:
            return
        # running = (1 - m) * before + m * biased; what m added grows by 1 / (n - 1). Of an
        # earlier forward pass before the same step, as much as the average keeps.
        keep = 1 - module.momentum
        missing = (module.running_var - keep * before) / (num_values - 1)
        earlier = self._missing.get(module)
        self._missing[module] = missing if earlier is None else missing + keep * earlier

    @torch.no_grad()
    def apply(self) -> None:
        """Add what is missing since the last call."""
        for module, missing in self._missing.items():
            module.running_var.add_(missing)  # type: ignore[operator]
        self._missing.clear()
