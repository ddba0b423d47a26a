"""The gradient of ELU, and so of SELU and CELU, as torch has it.

torch_xla 2.8 takes the layer's input for its output where the layer isn't in place: below zero it
gives x + alpha instead of alpha * exp(x).
"""

from functools import cache

import torch

from accbench.engines.xla import importing

# Kept, for its end would take the kernel back.
_library: list[torch.library.Library] = []


@cache
def replace_kernel() -> None:
    """For all that is computed on XLA's device in this process."""
    importing.torch_xla()  # or its kernel would come after ours
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    library.impl("elu_backward", _elu_backward, "XLA")


def _elu_backward(
    grad_output: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool,
    self_or_result: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    below = alpha * scale  # of scale * alpha * (exp(input_scale * x) - 1)
    x = self_or_result
    slope = x + below if is_result else below * torch.exp(x.clamp(max=0) * input_scale)
    return grad_output * torch.where(x <= 0, input_scale * slope, scale)
