"""BatchNorm, LayerNorm and GroupNorm as precise as torch's, in place of torch_xla's own.

torch_xla 2.8 has XLA compute a variance as the mean of the squares less the square of the mean. For
values whose mean is 100 deviations that leaves three of float32's seven digits. And it leaves
BatchNorm's running variance biased, where torch multiplies by n / (n - 1) for n values a channel:
3 % too little where a late layer has 32 values, and evaluation then uses it.

BatchNorm is computed here. LayerNorm and GroupNorm do not change when one number is subtracted from
all values that are normalised together; so a value near their mean is subtracted first. The mean of
a part of them will do, and spares a pass through memory: a digit is lost where it is 3 deviations
off. On a GPU it is the median of three values, for which no kernel is launched.
The errors before and after: benchmarks/research/norm_precision.py; the cost:
benchmarks/research/norm_cost.py.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from accbench.engines.xla.kernels import registration
from accbench.engines.xla_common import half_ops

# The mean of so many values is mostly within an eighth of a deviation of the mean of all.
_NUM_SAMPLED = 64


class _Settings:
    """What `replace_kernels` was last told."""

    single_pass = False


def replace_kernels(single_pass: bool) -> None:
    """Register these kernels for XLA's device in this process.

    Args:
        single_pass: compute BatchNorm's statistics in one pass through memory, which is faster on a
            GPU and slower on a CPU.
    """
    _Settings.single_pass = single_pass
    _register()


@cache
def _register() -> None:
    registration.replace(_KERNELS, "AutogradXLA")


def _loses_digits(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float32, torch.float64) and values.numel() > 0


@torch.no_grad()
def _near_mean(values: torch.Tensor, first: int, *others: int) -> torch.Tensor:
    """Return about the mean over dimensions, which stay with length 1.

    It is the mean of some of the values, from the middle of the first dimension.
    """
    num_per_row = math.prod(values.shape[dim] for dim in others)
    length = values.shape[first]
    num_rows = min(length, math.ceil(_NUM_SAMPLED / num_per_row))
    sample = values.narrow(first, (length - num_rows) // 2, num_rows)
    return sample.mean((first, *others), keepdim=True)


@torch.no_grad()
def _shift_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return a value near the mean of each row, (..., length) -> (..., 1)."""
    length = rows.shape[-1]
    if not _Settings.single_pass:
        return _near_mean(rows, rows.dim() - 1)
    low, middle, high = (rows.narrow(-1, length * quarter // 4, 1) for quarter in (1, 2, 3))
    # The median: a single value may be far from all others, as a few channels of trained
    # transformers are.
    return torch.maximum(
        torch.minimum(low, middle), torch.minimum(torch.maximum(low, middle), high)
    )


def _call_torch(operation: Any, *args: Any) -> torch.Tensor:
    """Call torch's composite implementation of an operation, with its error messages."""
    out: torch.Tensor = operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)
    return out


def _batch_norm(
    batch: torch.Tensor, weight_C: Any, bias_C: Any, mean_C: Any, var_C: Any, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    vectors = [vector for vector in (weight_C, bias_C, mean_C, var_C) if vector is not None]
    fits = all(vector.shape == batch.shape[1:2] for vector in vectors)
    has_statistics = training or (mean_C is not None and var_C is not None)
    if not has_statistics or not fits or batch.dim() < 2 or batch.numel() == 0:
        return _call_torch(  # also for its error messages
            torch.ops.aten.batch_norm.default,
            batch, weight_C, bias_C, mean_C, var_C, training, momentum, eps, cudnn,
        )  # fmt: skip
    batch_float = batch.float() if batch.dtype in half_ops.HALF_DTYPES else batch
    if not training:
        with torch.autocast("xla", enabled=False):
            return _normalise_by(batch_float, weight_C, bias_C, mean_C, var_C, eps).to(batch.dtype)
    batch_var_C, batch_mean_C = _moments(batch_float, 0, *range(2, batch.dim()))
    if mean_C is not None and var_C is not None:
        with torch.no_grad():
            num_values = batch.numel() // batch.shape[1]
            factor = momentum * num_values / max(num_values - 1, 1)
            mean_C.lerp_(batch_mean_C.to(mean_C.dtype), momentum)
            var_C.mul_(1 - momentum).add_(batch_var_C.to(var_C.dtype), alpha=factor)
    invstd_C = torch.rsqrt(batch_var_C + eps)
    out: torch.Tensor = _PreciseBatchNorm.apply(
        batch_float, weight_C, bias_C, batch_mean_C, invstd_C, eps
    )
    return out.to(batch.dtype)


def _normalise_by(
    batch: torch.Tensor, weight_C: torch.Tensor | None, bias_C: torch.Tensor | None,
    mean_C: torch.Tensor, var_C: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Normalise by given statistics, as in evaluation.

    torch_xla's own kernel aborts the process in its gradient, which is needed where parameters
    train all the same, as those of frozen BatchNorms may.
    """
    scale_C = torch.rsqrt(var_C + eps)
    if weight_C is not None:
        scale_C = weight_C * scale_C
    out = (batch - _per_channel(mean_C, batch)) * _per_channel(scale_C, batch)
    return out if bias_C is None else out + _per_channel(bias_C, batch)


@torch.no_grad()
def _moments(values: torch.Tensor, *dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return biased variance and mean over dimensions, without these dimensions."""
    if not _Settings.single_pass:
        return torch.var_mean(values, dims, correction=0)
    near_mean = _near_mean(values, *dims)
    deviations = values - near_mean
    mean_deviation, mean_square = deviations.mean(dims), (deviations * deviations).mean(dims)
    variance = (mean_square - mean_deviation * mean_deviation).clamp(min=0)
    return variance, mean_deviation + near_mean.reshape(-1)


class _PreciseBatchNorm(torch.autograd.Function):
    """Normalisation of (N, C, ...) by the batch's own statistics, which are arguments."""

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor | None, bias_C: torch.Tensor | None,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(batch, weight_C, mean_C, invstd_C)
        ctx.eps = eps
        scale_C = invstd_C if weight_C is None else weight_C * invstd_C
        out = (batch - _per_channel(mean_C, batch)) * _per_channel(scale_C, batch)
        return out if bias_C is None else out + _per_channel(bias_C, batch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, mean_C, invstd_C = ctx.saved_tensors
        # For a second derivative, which goes through the statistics, too.
        if torch.is_grad_enabled():
            arguments = (gradient, batch, weight_C, None, None, mean_C, invstd_C, True, ctx.eps)
            output_mask = ctx.needs_input_grad[:3]
            gradients = torch.ops.aten.native_batch_norm_backward(*arguments, output_mask)
            grads = (
                grad if is_wanted else None
                for grad, is_wanted in zip(gradients, output_mask, strict=True)
            )
            return *grads, None, None, None
        dims = (0, *range(2, batch.dim()))
        num_values = batch.numel() // batch.shape[1]
        centered = batch - _per_channel(mean_C, batch)
        grad_bias_C = gradient.sum(dims)
        sum_product_C = (gradient * centered).sum(dims)
        slope_C = sum_product_C * invstd_C * invstd_C / num_values
        scale_C = invstd_C if weight_C is None else weight_C * invstd_C
        grad_normal = gradient - _per_channel(grad_bias_C / num_values, batch)
        grad_batch = (grad_normal - centered * _per_channel(slope_C, batch)) * _per_channel(
            scale_C, batch
        )
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_weight_C = sum_product_C * invstd_C if needs_weight else None
        return grad_batch, grad_weight_C, grad_bias_C if needs_bias else None, None, None, None


def _per_channel(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


def _layer_norm(values: torch.Tensor, shape: list[int], *others: Any) -> torch.Tensor:
    if _loses_digits(values) and 0 < len(shape) <= values.dim():
        kept_dims = values.shape[: -len(shape)]
        shift = _shift_of_rows(values.flatten(-len(shape)))
        values = values - shift.view(*kept_dims, *[1] * len(shape))
    return _call_torch(torch.ops.aten.layer_norm.default, values, shape, *others)


def _group_norm(values: torch.Tensor, num_groups: int, *others: Any) -> torch.Tensor:
    if _loses_digits(values) and values.dim() >= 2 and values.shape[1] % num_groups == 0:
        grouped = values.reshape(values.shape[0], num_groups, -1)
        values = (grouped - _shift_of_rows(grouped)).reshape(values.shape)
    return _call_torch(torch.ops.aten.group_norm.default, values, num_groups, *others)


_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
}
