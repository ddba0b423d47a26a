"""The gradient of ELU, and so of SELU and CELU, as torch has it.

torch_xla 2.8 takes the layer's input for its output where the layer isn't in place: below zero it
gives x + alpha instead of alpha * exp(x).
"""

import torch


def elu_backward(
    grad_output: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool,
    self_or_result: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    below = alpha * scale  # of scale * alpha * (exp(input_scale * x) - 1)
    x = self_or_result
    slope = x + below if is_result else below * torch.exp(x.clamp(max=0) * input_scale)
    return grad_output * torch.where(x <= 0, input_scale * slope, scale)
