"""Single operations that torch_xla 2.8 has otherwise than torch, or none that a step could use."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from accbench.engines.xla.kernels import registration

Tensors = tuple[torch.Tensor, ...]
Kernel = Callable[..., torch.Tensor]

aten = torch.ops.aten


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process."""
    registration.replace(
        {
            "abs": _abs,
            "_cdist_forward": _cdist,
            "clamp_max.Tensor": _clamp(torch.clamp_max),
            "clamp_min.Tensor": _clamp(torch.clamp_min),
            "diagonal_copy": _diagonal,
            "diagonal_scatter": _with_diagonal,
            "elu_backward": _elu_backward,
            "_linalg_slogdet": _slogdet,
            "_linalg_svd": _svd,
            "nll_loss_forward": _nll_loss,
            "nll_loss_backward": _nll_loss_backward,
            "_pdist_forward": _pdist,
        },
        "XLA",
    )
    registration.replace({"cdist": _cdist, "_fft_c2r": _RealTransform.apply}, "AutogradXLA")


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


def _svd(
    matrices: torch.Tensor, full: bool = False, with_vectors: bool = True, driver: Any = None
) -> Tensors:
    """Of batches torch_xla ends the process."""
    if matrices.dim() > 2:
        raise RuntimeError(
            "engine xla has singular values of single matrices alone (svd, pinv, the nuclear and "
            "the spectral norm): go through the batch in a loop, or use another --engine"
        )
    outs = tuple(matrices.new_empty(0) for _ in range(3))
    out: Tensors = torch._linalg_svd(matrices, full, with_vectors, out=outs)
    return out


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2, compute_mode: int | None = None
) -> torch.Tensor:
    """torch_xla has none of batches that have to be broadcast, and no gradient on a CPU."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _pdist(rows: torch.Tensor, p: float = 2) -> torch.Tensor:
    """For p = 0 torch_xla's is infinite."""
    first, second = (registration.constant(rows.device, _pairs, len(rows), of) for of in (0, 1))
    return torch.linalg.vector_norm(rows[first] - rows[second], p, -1)


def _pairs(num: int, of: int) -> np.ndarray:
    return np.triu_indices(num, 1)[of]


def _clamp(own: Any) -> Kernel:
    """torch_xla ends the process where what is clamped has to be broadcast."""

    def kernel(given: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        given, limit = torch.broadcast_tensors(given, limit)
        dtype = torch.result_type(given, limit)
        out: torch.Tensor = own(given, limit, out=given.new_empty(0, dtype=dtype))
        return out

    return kernel


def _diagonal(given: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """torch_xla's is another one where its dimensions are not the last two."""
    places = _diagonal_places(given, offset, dim1, dim2)
    return _flat(given, dim1, dim2).index_select(-1, places)


def _with_diagonal(
    given: torch.Tensor, values: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    places = _diagonal_places(given, offset, dim1, dim2)
    changed = _flat(given, dim1, dim2).index_copy(-1, places, values)
    last = changed.unflatten(-1, (given.shape[dim1], given.shape[dim2]))
    return last.clone().movedim((-2, -1), (dim1, dim2)).clone()  # see `kernels.replace`


def _diagonal_places(given: torch.Tensor, offset: int, dim1: int, dim2: int) -> torch.Tensor:
    sizes = given.shape[dim1], given.shape[dim2]
    return registration.constant(given.device, _diagonal_of_flat, *sizes, offset)


def _diagonal_of_flat(num_rows: int, num_columns: int, offset: int) -> np.ndarray:
    return np.arange(num_rows * num_columns).reshape(num_rows, num_columns).diagonal(offset).copy()


def _flat(given: torch.Tensor, dim1: int, dim2: int) -> torch.Tensor:
    return given.movedim((dim1, dim2), (-2, -1)).flatten(-2)


def _nll_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
) -> Tensors:
    """Of one sample without a batch torch_xla ends the process."""
    alone = scores.dim() == 1
    if alone:
        scores, target = scores.unsqueeze(0), target.reshape(1)
    loss, total = scores.new_empty(0), scores.new_empty(0)
    aten.nll_loss_forward.output(
        scores, target, weight, reduction, ignored, output=loss, total_weight=total
    )
    return loss.reshape(()).clone() if alone else loss, total


def _nll_loss_backward(
    gradient: torch.Tensor, scores: torch.Tensor, target: torch.Tensor, weight: Any,
    reduction: int, ignored: int, total: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    alone = scores.dim() == 1
    if alone:
        scores, target = scores.unsqueeze(0), target.reshape(1)
        gradient = gradient if reduction else gradient.reshape(1)
    found = scores.new_empty(0)
    aten.nll_loss_backward.grad_input(
        gradient, scores, target, weight, reduction, ignored, total, grad_input=found
    )
    return found.squeeze(0).clone() if alone else found


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
        counts = registration.constant(
            found.device, _counts, found.shape[last], gradient.shape[last]
        )
        return found * counts.view(-1, *[1] * (found.dim() - last - 1)), None, None, None


def _counts(num: int, length: int) -> np.ndarray:
    """How often each of these frequencies is among all of them."""
    counts = np.ones(num, np.float32)
    counts[1 : 1 + length - num] = 2
    return counts
