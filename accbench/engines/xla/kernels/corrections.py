"""Single operations that torch_xla 2.8 computes differently from torch, or cannot run in a step."""

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
    """Register these kernels for XLA's device in this process."""
    registration.replace(
        {
            "abs": _abs,
            "_cdist_forward": _cdist,
            "clamp_max.Tensor": _clamp(torch.clamp_max),
            "clamp_min.Tensor": _clamp(torch.clamp_min),
            "diagonal_copy": _diagonal,
            "diagonal_scatter": _diagonal_scatter,
            "elu_backward": _elu_backward,
            "_linalg_slogdet": _slogdet,
            "_linalg_svd": _svd,
            "nll_loss_forward": _nll_loss,
            "nll_loss_backward": _nll_loss_backward,
            "_pdist_forward": _pdist,
        },
        "XLA",
    )
    registration.replace({"cdist": _cdist, "_fft_c2r": _InverseRealFFT.apply}, "AutogradXLA")


def _abs(values: torch.Tensor) -> torch.Tensor:
    """Compute `abs` as a real number; torch_xla's is complex for complex input."""
    if values.is_complex():
        return torch.view_as_real_copy(values).square().sum(-1).sqrt()
    return torch.abs(values, out=values.new_empty(0))


def _elu_backward(
    grad_output: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool,
    self_or_result: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute the gradient of ELU, and so of SELU and CELU.

    torch_xla takes the layer's input for its output where the layer isn't in place: below zero it
    gives x + alpha instead of alpha * exp(x).
    """
    scaled_alpha = alpha * scale  # ELU is scale * alpha * (exp(input_scale * x) - 1) below 0
    x = self_or_result
    slope = (
        x + scaled_alpha if is_result else scaled_alpha * torch.exp(x.clamp(max=0) * input_scale)
    )
    return grad_output * torch.where(x <= 0, input_scale * slope, scale)


def _slogdet(matrices: torch.Tensor) -> Tensors:
    """Compute the sign and logarithm of determinants, and the factors for their gradient.

    torch_xla leaves the factors out.

    Args:
        matrices: (..., N, N).

    Returns:
        sign (...), logarithm (...), and the LU factors and pivots of the transpose, as torch has
        them for contiguous input.
    """
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrices.mT)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    swapped = pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    is_odd = (swapped.sum(-1) + (diagonal < 0).sum(-1)) % 2
    sign = (1 - 2 * is_odd) * (diagonal != 0).all(-1)
    return sign.to(matrices.dtype), diagonal.abs().log().sum(-1), factors, pivots


def _svd(
    matrices: torch.Tensor, full: bool = False, with_vectors: bool = True, driver: Any = None
) -> Tensors:
    """Compute the singular value decomposition of a single matrix.

    Raises:
        RuntimeError: the input is a batch, for which torch_xla aborts the process.
    """
    if matrices.dim() > 2:
        raise RuntimeError(
            "engine xla computes singular values of single matrices only (svd, pinv, the nuclear "
            "and the spectral norm): go through the batch in a loop, or use another --engine"
        )
    outs = tuple(matrices.new_empty(0) for _ in range(3))
    out: Tensors = torch._linalg_svd(matrices, full, with_vectors, out=outs)
    return out


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2, compute_mode: int | None = None
) -> torch.Tensor:
    """Compute `cdist`; torch_xla's doesn't broadcast batches, and has no gradient on a CPU."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _pdist(rows: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Compute `pdist`; torch_xla's is infinite for p = 0."""
    first, second = (
        registration.constant(rows.device, _pair_indices, len(rows), side) for side in (0, 1)
    )
    return torch.linalg.vector_norm(rows[first] - rows[second], p, -1)


def _pair_indices(num_rows: int, side: int) -> np.ndarray:
    return np.triu_indices(num_rows, 1)[side]


def _clamp(xla_kernel: Any) -> Kernel:
    """Make a kernel that broadcasts before it clamps; torch_xla aborts the process there."""

    def kernel(values: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        values, limit = torch.broadcast_tensors(values, limit)
        dtype = torch.result_type(values, limit)
        out: torch.Tensor = xla_kernel(values, limit, out=values.new_empty(0, dtype=dtype))
        return out

    return kernel


def _diagonal(tensor: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Compute `diagonal`; torch_xla's is wrong unless its dimensions are the last two."""
    indices = _diagonal_indices(tensor, offset, dim1, dim2)
    return _with_flat_dims(tensor, dim1, dim2).index_select(-1, indices)


def _diagonal_scatter(
    tensor: torch.Tensor, values: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    indices = _diagonal_indices(tensor, offset, dim1, dim2)
    changed = _with_flat_dims(tensor, dim1, dim2).index_copy(-1, indices, values)
    last = changed.unflatten(-1, (tensor.shape[dim1], tensor.shape[dim2]))
    return last.clone().movedim((-2, -1), (dim1, dim2)).clone()  # see `registration.replace`


def _diagonal_indices(tensor: torch.Tensor, offset: int, dim1: int, dim2: int) -> torch.Tensor:
    sizes = tensor.shape[dim1], tensor.shape[dim2]
    return registration.constant(tensor.device, _diagonal_of_flat, *sizes, offset)


def _diagonal_of_flat(num_rows: int, num_columns: int, offset: int) -> np.ndarray:
    return np.arange(num_rows * num_columns).reshape(num_rows, num_columns).diagonal(offset).copy()


def _with_flat_dims(tensor: torch.Tensor, dim1: int, dim2: int) -> torch.Tensor:
    return tensor.movedim((dim1, dim2), (-2, -1)).flatten(-2)


def _nll_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> Tensors:
    """Compute `nll_loss`, also of one sample without a batch, for which torch_xla aborts."""
    is_unbatched = scores.dim() == 1
    if is_unbatched:
        scores, target = scores.unsqueeze(0), target.reshape(1)
    loss, total = scores.new_empty(0), scores.new_empty(0)
    aten.nll_loss_forward.output(
        scores, target, weight, reduction, ignore_index, output=loss, total_weight=total
    )
    return loss.reshape(()).clone() if is_unbatched else loss, total


def _nll_loss_backward(
    gradient: torch.Tensor, scores: torch.Tensor, target: torch.Tensor, weight: Any,
    reduction: int, ignore_index: int, total: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    is_unbatched = scores.dim() == 1
    if is_unbatched:
        scores, target = scores.unsqueeze(0), target.reshape(1)
        gradient = gradient if reduction else gradient.reshape(1)
    grad_scores = scores.new_empty(0)
    aten.nll_loss_backward.grad_input(
        gradient, scores, target, weight, reduction, ignore_index, total, grad_input=grad_scores
    )
    return grad_scores.squeeze(0).clone() if is_unbatched else grad_scores


class _InverseRealFFT(torch.autograd.Function):
    """The inverse Fourier transform with a real result.

    torch writes into a part of its gradient, of which torch_xla then takes the wrong size.
    """

    @staticmethod
    def forward(
        ctx: Any, spectrum: torch.Tensor, dims: list[int], normalization: int, length: int
    ) -> torch.Tensor:
        ctx.dims, ctx.normalization = dims, normalization
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch._fft_c2r(spectrum, dims, normalization, length)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        grad_spectrum = torch._fft_r2c(gradient, ctx.dims, ctx.normalization, True)
        last_dim = ctx.dims[-1] % grad_spectrum.dim()
        counts = registration.constant(
            grad_spectrum.device,
            _frequency_counts,
            grad_spectrum.shape[last_dim],
            gradient.shape[last_dim],
        )
        return (
            grad_spectrum * counts.view(-1, *[1] * (grad_spectrum.dim() - last_dim - 1)),
            None,
            None,
            None,
        )


def _frequency_counts(num: int, length: int) -> np.ndarray:
    """Return how often each of `num` frequencies occurs in a full transform, (num,)."""
    counts = np.ones(num, np.float32)
    counts[1 : 1 + length - num] = 2
    return counts
