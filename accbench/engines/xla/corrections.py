"""Single operations that torch_xla 2.8 has otherwise than torch, or none that a step could use."""

from functools import cache
from typing import Any

import numpy as np
import torch

from accbench.engines.xla import kernels

Tensors = tuple[torch.Tensor, ...]


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process."""
    kernels.replace(
        {
            "abs": _abs,
            "_cdist_forward": _cdist,
            "_linalg_slogdet": _slogdet,
            "elu_backward": _elu_backward,
        },
        "XLA",
    )
    kernels.replace({"cdist": _cdist, "_fft_c2r": _RealTransform.apply}, "AutogradXLA")


def _abs(given: torch.Tensor) -> torch.Tensor:
    """torch_xla's is a complex number where it was given one."""
    if given.is_complex():
        return torch.view_as_real_copy(given).square().sum(-1).sqrt()
    return torch.abs(given, out=given.new_empty(0))


def _elu_backward(
    grad_output: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool,
    self_or_result: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Of ELU, and so of SELU and CELU. torch_xla takes the layer's input for its output where the
    layer isn't in place: below zero it gives x + alpha instead of alpha * exp(x)."""
    below = alpha * scale  # of scale * alpha * (exp(input_scale * x) - 1)
    x = self_or_result
    slope = x + below if is_result else below * torch.exp(x.clamp(max=0) * input_scale)
    return grad_output * torch.where(x <= 0, input_scale * slope, scale)


def _slogdet(matrices: torch.Tensor) -> Tensors:
    """(..., N, N) -> sign, logarithm, and what the gradient is computed from, which torch_xla
    leaves out: factors of the transpose, as torch has them of what is contiguous."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrices.mT)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    swapped = pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    is_odd = (swapped.sum(-1) + (diagonal < 0).sum(-1)) % 2
    sign = (1 - 2 * is_odd) * (diagonal != 0).all(-1)
    return sign.to(matrices.dtype), diagonal.abs().log().sum(-1), factors, pivots


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2, compute_mode: int | None = None
) -> torch.Tensor:
    """torch_xla has none of batches that have to be broadcast, and no gradient on a CPU."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    return torch.linalg.vector_norm(apart, p, -1)


class _RealTransform(torch.autograd.Function):
    """The inverse Fourier transform that gives real numbers. torch writes into a part of its
    gradient, of which torch_xla then takes the wrong size."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, dims: list[int], normalization: int, length: int
    ) -> torch.Tensor:
        ctx.dims, ctx.normalization = dims, normalization
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch._fft_c2r(given, dims, normalization, length)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found = torch._fft_r2c(gradient, ctx.dims, ctx.normalization, True)
        last = ctx.dims[-1] % found.dim()
        counts = kernels.constant(found.device, _counts, found.shape[last], gradient.shape[last])
        return found * counts.view(-1, *[1] * (found.dim() - last - 1)), None, None, None


def _counts(num: int, length: int) -> np.ndarray:
    """How often each of these frequencies is among all of them."""
    counts = np.ones(num, np.float32)
    counts[1 : 1 + length - num] = 2
    return counts
