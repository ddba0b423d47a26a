"""BatchNorm, LayerNorm and GroupNorm as precise as torch's, in place of torch_xla's own.

torch_xla 2.8 has XLA take a variance as the mean of the squares less the square of the mean. Of
values whose mean is 100 deviations that leaves three of float32's seven digits. And it leaves
BatchNorm's running variance biased, where torch multiplies by n / (n - 1) for n values a channel:
3 % too little where a late layer has 32 values, and evaluation then sees it.

BatchNorm is spelled out here. LayerNorm and GroupNorm do not change when one number is taken from
all that are normalised together; so what is about their mean is taken from them first. That of a
part will do, and spares a pass through memory: a digit is lost where it is 3 deviations off.
On a GPU it is the second of three values, for which no kernel is launched.
How far off all was and is: benchmarks/norm_precision.py; what it costs: benchmarks/norm_cost.py.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from accbench.engines.xla.kernels import registration
from accbench.engines.xla_common import half_ops

# Values whose mean is within an eighth of a deviation of all values', mostly.
_ENOUGH = 64


class _Spelling:
    lean = False


def replace_kernels(lean: bool) -> None:
    """For all that is computed on XLA's device in this process.

    Args:
        lean: find BatchNorm's statistics in one pass through memory, which a GPU does in less
            time, and a CPU in more.
    """
    _Spelling.lean = lean
    _register()


@cache
def _register() -> None:
    registration.replace(_KERNELS, "AutogradXLA")


def _loses_digits(given: torch.Tensor) -> bool:
    return given.dtype in (torch.float32, torch.float64) and given.numel() > 0


@torch.no_grad()
def _near_mean(given: torch.Tensor, first: int, *others: int) -> torch.Tensor:
    """About the mean over these dimensions, which stay with length 1: that of some of the values,
    from the middle of the first dimension."""
    num_of_each = math.prod(given.shape[dim] for dim in others)
    length = given.shape[first]
    num = min(length, math.ceil(_ENOUGH / num_of_each))
    part = given.narrow(first, (length - num) // 2, num)
    return part.mean((first, *others), keepdim=True)


@torch.no_grad()
def _within(rows: torch.Tensor) -> torch.Tensor:
    """A value near the mean of each row, (..., length) -> (..., 1)."""
    length = rows.shape[-1]
    if not _Spelling.lean:
        return _near_mean(rows, rows.dim() - 1)
    low, mid, high = (rows.narrow(-1, length * part // 4, 1) for part in (1, 2, 3))
    # The second by size: one alone may be far from all others, as a few channels of trained
    # transformers are.
    return torch.maximum(torch.minimum(low, mid), torch.minimum(torch.maximum(low, mid), high))


def _by_torch(operation: Any, *args: Any) -> torch.Tensor:
    """What is registered beside our kernels: torch's own, with its refusals."""
    out: torch.Tensor = operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)
    return out


def _batch_norm(
    batch: torch.Tensor, weight_C: Any, bias_C: Any, mean_C: Any, var_C: Any, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    of_channels = [one for one in (weight_C, bias_C, mean_C, var_C) if one is not None]
    whole = all(one.shape == batch.shape[1:2] for one in of_channels)
    has_statistics = training or (mean_C is not None and var_C is not None)
    if not has_statistics or not whole or batch.dim() < 2 or batch.numel() == 0:
        return _by_torch(  # also for its refusals
            torch.ops.aten.batch_norm.default,
            batch, weight_C, bias_C, mean_C, var_C, training, momentum, eps, cudnn,
        )  # fmt: skip
    wide = batch.float() if batch.dtype in half_ops.HALF_DTYPES else batch
    if not training:
        with torch.autocast("xla", enabled=False):
            return _by_given(wide, weight_C, bias_C, mean_C, var_C, eps).to(batch.dtype)
    of_batch_var_C, of_batch_mean_C = _moments(wide, 0, *range(2, batch.dim()))
    if mean_C is not None and var_C is not None:
        with torch.no_grad():
            num_values = batch.numel() // batch.shape[1]
            part = momentum * num_values / max(num_values - 1, 1)
            mean_C.lerp_(of_batch_mean_C.to(mean_C.dtype), momentum)
            var_C.mul_(1 - momentum).add_(of_batch_var_C.to(var_C.dtype), alpha=part)
    invstd_C = torch.rsqrt(of_batch_var_C + eps)
    out: torch.Tensor = _BatchNorm.apply(wide, weight_C, bias_C, of_batch_mean_C, invstd_C, eps)
    return out.to(batch.dtype)


def _by_given(
    batch: torch.Tensor, weight_C: torch.Tensor | None, bias_C: torch.Tensor | None,
    mean_C: torch.Tensor, var_C: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """As in evaluation. Where parameters train all the same, as frozen BatchNorms' do,
    torch_xla's gradient of it ends the process."""
    scale_C = torch.rsqrt(var_C + eps)
    if weight_C is not None:
        scale_C = weight_C * scale_C
    out = (batch - _wide(mean_C, batch)) * _wide(scale_C, batch)
    return out if bias_C is None else out + _wide(bias_C, batch)


@torch.no_grad()
def _moments(given: torch.Tensor, *dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance, biased, and mean over these dimensions, without them."""
    if not _Spelling.lean:
        return torch.var_mean(given, dims, correction=0)
    near = _near_mean(given, *dims)
    rest = given - near
    of_rest, of_squares = rest.mean(dims), (rest * rest).mean(dims)
    return (of_squares - of_rest * of_rest).clamp(min=0), of_rest + near.reshape(-1)


class _BatchNorm(torch.autograd.Function):
    """Normalise (N, C, ...) by these statistics, which are its own."""

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor | None, bias_C: torch.Tensor | None,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(batch, weight_C, mean_C, invstd_C)
        ctx.eps = eps
        scale_C = invstd_C if weight_C is None else weight_C * invstd_C
        out = (batch - _wide(mean_C, batch)) * _wide(scale_C, batch)
        return out if bias_C is None else out + _wide(bias_C, batch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, mean_C, invstd_C = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, which takes the statistics' part
            given = (gradient, batch, weight_C, None, None, mean_C, invstd_C, True, ctx.eps)
            wanted = ctx.needs_input_grad[:3]
            of_each = torch.ops.aten.native_batch_norm_backward(*given, wanted)
            needed = (one if want else None for one, want in zip(of_each, wanted, strict=True))
            return *needed, None, None, None
        dims = (0, *range(2, batch.dim()))
        num_values = batch.numel() // batch.shape[1]
        centered = batch - _wide(mean_C, batch)
        of_bias_C = gradient.sum(dims)
        of_centered_C = (gradient * centered).sum(dims)
        slope_C = of_centered_C * invstd_C * invstd_C / num_values
        scale_C = invstd_C if weight_C is None else weight_C * invstd_C
        of_normal = gradient - _wide(of_bias_C / num_values, batch)
        of_batch = (of_normal - centered * _wide(slope_C, batch)) * _wide(scale_C, batch)
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        of_weight_C = of_centered_C * invstd_C if for_weight else None
        return of_batch, of_weight_C, of_bias_C if for_bias else None, None, None, None


def _wide(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


def _layer_norm(given: torch.Tensor, shape: list[int], *others: Any) -> torch.Tensor:
    if _loses_digits(given) and 0 < len(shape) <= given.dim():
        given = given - _within(given.flatten(-len(shape))).view(*given.shape[: -len(shape)],
                                                                 *[1] * len(shape))  # fmt: skip
    return _by_torch(torch.ops.aten.layer_norm.default, given, shape, *others)


def _group_norm(given: torch.Tensor, num_groups: int, *others: Any) -> torch.Tensor:
    if _loses_digits(given) and given.dim() >= 2 and given.shape[1] % num_groups == 0:
        of_groups = given.reshape(given.shape[0], num_groups, -1)
        given = (of_groups - _within(of_groups)).reshape(given.shape)
    return _by_torch(torch.ops.aten.group_norm.default, given, num_groups, *others)


_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
}
