"""BatchNorm, ReLU and max-pooling in 16 bits, spelled so that XLA moves few bytes.

They compute what eager computes on CUDA and round where it rounds: results in the batch's type,
statistics and gradients of statistics in float32. Each is a function of its own for autograd, for
what costs is the backward pass. torch_xla's has a ReLU write the masked gradient for BatchNorm's
two passes to read, keeps masks and BatchNorm's input for it, and max-pooling's indices in 32 bits.
How the spellings came about, with the bytes of each: docs/measured.md.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from accbench.engines.xla_common import channel_sums
from accbench.engines.xla_common.pool_windows import Windows
from accbench.engines.xla_common.scalars import number

TYPES = (torch.float16, torch.bfloat16)
# What is not larger than this rounds to 0 or below: half of the smallest float16. bfloat16 has
# float32's range.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
# Where a result of `batch_norm` keeps what it was computed from, for a ReLU that follows, and
# where that ReLU's result does, for a max-pooling.
_ORIGIN, _ORIGIN_OF_RELU = "_accbench_batch_norm", "_accbench_batch_norm_relu"


def are_for(given: torch.Tensor) -> bool:
    """Whether a step goes back through what is computed of this, in 16 bits."""
    return given.requires_grad and torch.is_grad_enabled() and given.dtype in TYPES


def batch_norm(
    batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
    running_mean_C: torch.Tensor | None, running_var_C: torch.Tensor | None,
    momentum: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """`torch.nn.functional.batch_norm` in training, of (N, C) or (N, C, ...)."""
    num_values = batch.numel() // batch.shape[1]
    with torch.no_grad():
        wide = batch.float()
        total_C, of_squares_C = channel_sums.sums(wide, wide * wide, again=True)
        mean_C = total_C / num_values
        var_C = (of_squares_C / num_values - mean_C * mean_C).clamp(min=0)
        invstd_C = torch.rsqrt(var_C + eps)
        if running_mean_C is not None and running_var_C is not None:
            running_mean_C.mul_(1 - momentum).add_(mean_C, alpha=momentum)
            unbiased_C = var_C * (num_values / max(num_values - 1, 1))
            running_var_C.mul_(1 - momentum).add_(unbiased_C, alpha=momentum)
    origin = (batch, weight_C, bias_C, mean_C, invstd_C)
    out = _apply(_BatchNorm, *origin, False)
    setattr(out, _ORIGIN, (origin, out._version))
    return out


def _origin(of: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...] | None:
    """What a result was computed from, unless it was written to since."""
    origin: tuple[torch.Tensor, ...] | None
    origin, at_version = getattr(of, kind, (None, 0))
    return origin if of._version == at_version else None


def relu(given: torch.Tensor) -> torch.Tensor:
    """`torch.relu`; of a BatchNorm's result, with one backward pass for both."""
    origin = _origin(given, _ORIGIN)
    if origin is None:
        return _apply(_Relu, given)
    out = _apply(_BatchNorm, *origin, True)
    setattr(out, _ORIGIN_OF_RELU, (origin, out._version))
    return out


def relu_in_place(given: torch.Tensor) -> torch.Tensor:
    """`torch.relu_`; as `relu` where that can be."""
    if given.grad_fn is None or given._is_view():
        return torch.relu_(given)
    origin = _origin(given, _ORIGIN)
    out = relu(given)
    # Without the history, or a gradient of zeros would be carried through all of it.
    given.detach_().copy_(out)
    if origin is not None:
        setattr(given, _ORIGIN_OF_RELU, (origin, given._version))
    return given


def can_pool(
    given: torch.Tensor, size: Sequence[int], dilation: Sequence[int], ceil_mode: bool
) -> bool:
    """Whether `max_pool2d` is for this: (N, C, H, W) in 16 bits, and up to 255 places a window."""
    plain = given.dim() == 4 and set(dilation) == {1} and not ceil_mode
    return plain and are_for(given) and math.prod(_pair(size)) <= 255


def is_normal_relu(given: torch.Tensor) -> bool:
    """Whether it came from `batch_norm` and a ReLU, and was not written to since."""
    return _origin(given, _ORIGIN_OF_RELU) is not None


def max_pool2d(
    given: torch.Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """`torch.max_pool2d` of what `can_pool` lets through; of BatchNorm and ReLU, with one backward
    pass for the three."""
    windows = Windows(_pair(size), _pair(stride or size), _pair(padding), given.shape)
    origin = _origin(given, _ORIGIN_OF_RELU)
    if origin is not None:
        return _apply(_BatchNormPool, *origin, windows)
    return _apply(_MaxPool, given, windows)


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return value[0], value[-1]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _BatchNorm(torch.autograd.Function):
    """Normalise by the batch's own statistics, and ReLU if asked to."""

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, relu: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(batch, weight_C, bias_C, mean_C, invstd_C)
        ctx.relu = relu
        centered = batch.float() - _wide(mean_C, batch)
        normal = _normal(centered, weight_C, bias_C, invstd_C).to(batch.dtype)
        return normal.relu() if relu else normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, bias_C, mean_C, invstd_C = ctx.saved_tensors
        centered = batch.float() - _wide(mean_C, batch)
        for_sum = for_product = for_batch = gradient.float()
        if ctx.relu:
            normal = _normal(centered, weight_C, bias_C, invstd_C)
            for_sum, for_product, for_batch = _masked(gradient, normal, centered)
        normalised = centered * _wide(invstd_C, batch)
        of_bias_C, of_weight_C = channel_sums.sums(for_sum, for_product * normalised)
        of_batch = _of_batch(
            batch, for_batch, normalised, of_weight_C, of_bias_C, weight_C * invstd_C
        )
        return of_batch, of_weight_C, of_bias_C, None, None, None


def _of_batch(
    batch: torch.Tensor, of_normal: torch.Tensor, normalised: torch.Tensor,
    of_weight_C: torch.Tensor, of_bias_C: torch.Tensor, scale_C: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The gradient of BatchNorm's input, from that of its result.

    The means are taken of what is as wide as the batch: of numbers as few as the channels nothing
    is to be computed between the sums and this, or XLA would launch a kernel for that.
    """
    num_values = batch.numel() // batch.shape[1]
    of_statistics = _wide(of_bias_C, batch) + normalised * _wide(of_weight_C, batch)
    return ((of_normal - of_statistics * (1 / num_values)) * _wide(scale_C, batch)).to(batch.dtype)


def _normal(
    centered: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, invstd_C: torch.Tensor
) -> torch.Tensor:
    return centered * _wide(weight_C * invstd_C, centered) + _wide(bias_C, centered)


def _masked(
    gradient: torch.Tensor, normal: torch.Tensor, centered: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient, in float32, where ReLU let its input pass: the same three times.

    The mask follows from BatchNorm's input, which every user of these reads anyway. Were it one
    and the same operation for all three, or did the first user not read that input for 0 times
    its value, XLA would rather compute the mask in the forward pass, write it and read it back.
    """
    least = _ROUNDS_TO_ZERO[gradient.dtype]
    above, below = number(least, normal), number(-least, normal)
    zero = number(0, gradient)
    wide = gradient.float()
    return (
        torch.where(normal > above, wide + 0 * centered, zero.float()),
        torch.where(-normal < below, wide, zero.float()),
        torch.where(normal <= above, zero, gradient).float(),
    )


def _wide(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        out = given.clamp(min=0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        # Not `out > 0`: XLA takes that back to what the ReLU was given, a sum of two tensors at a
        # residual's end, and reads both.
        return torch.where(out != number(0, out), gradient, number(0, gradient))


class _MaxPool(torch.autograd.Function):
    """What is kept for the backward pass is which place of each window won, as a byte."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, windows: Windows) -> torch.Tensor:
        ctx.windows = windows
        best, won = windows.largest(given)
        ctx.save_for_backward(won)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (won,) = ctx.saved_tensors
        return ctx.windows.spread(gradient, won).to(gradient.dtype), None


class _BatchNormPool(torch.autograd.Function):
    """Normalise by the batch's own statistics, ReLU, and the largest of each window.

    That is BatchNorm and ReLU of the largest that goes into them, or of the smallest where they
    turn the order around: both round alike what is alike, and keep the order otherwise. So what
    they make of the rest need not be computed, written and read.
    """

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, windows: Windows,
    ) -> torch.Tensor:  # fmt: skip
        turned_C = weight_C < number(0, weight_C)
        sign_C = torch.where(turned_C, number(-1, batch), number(1, batch))
        best, won = windows.largest(batch * _wide(sign_C, batch))
        best = best * _wide(sign_C, batch)
        ctx.windows = windows
        centered = best.float() - _wide(mean_C, batch)
        out = _normal(centered, weight_C, bias_C, invstd_C).to(batch.dtype).relu()
        ctx.save_for_backward(batch, weight_C, mean_C, invstd_C, best, won, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, mean_C, invstd_C, best, won, out = ctx.saved_tensors
        gradient = torch.where(out != number(0, out), gradient, number(0, gradient))
        wide = gradient.float()
        mean, invstd = _wide(mean_C, batch), _wide(invstd_C, batch)
        of_bias_C, of_weight_C = channel_sums.sums(wide, wide * ((best.float() - mean) * invstd))
        of_normal = ctx.windows.spread(gradient, won)
        of_batch = _of_batch(
            batch, of_normal, (batch.float() - mean) * invstd, of_weight_C, of_bias_C,
            weight_C * invstd_C,
        )  # fmt: skip
        return of_batch, of_weight_C, of_bias_C, None, None, None
