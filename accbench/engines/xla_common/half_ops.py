"""BatchNorm, ReLU and max-pooling in 16 bits, in a form for which XLA moves few bytes.

They compute what eager computes on CUDA and round where it rounds: results in the batch's dtype,
statistics and gradients of statistics in float32. Each is an autograd function of its own, for the
backward pass is what costs. In torch_xla's backward pass ReLU writes the masked gradient, which
BatchNorm's two passes read; it saves masks and BatchNorm's input, and max-pooling's indices in 32
bits. How these forms came about, with the bytes of each: docs/measured.md.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from accbench.engines.xla_common import channel_sums
from accbench.engines.xla_common.pool_windows import PoolWindows
from accbench.engines.xla_common.scalars import scalar_like

HALF_DTYPES = (torch.float16, torch.bfloat16)
# A value up to this rounds to 0 or below: half of the smallest float16. bfloat16 has float32's
# range.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
# Attributes in which a result of `batch_norm` keeps its inputs for a ReLU that follows, and that
# ReLU's result for a max-pooling.
_BATCH_NORM_INPUTS, _RELU_INPUTS = "_accbench_batch_norm", "_accbench_batch_norm_relu"


def supports(batch: torch.Tensor) -> bool:
    """Return whether a tensor is in 16 bits and takes part in a backward pass."""
    return batch.requires_grad and torch.is_grad_enabled() and batch.dtype in HALF_DTYPES


def batch_norm(
    batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
    running_mean_C: torch.Tensor | None, running_var_C: torch.Tensor | None,
    momentum: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Compute `torch.nn.functional.batch_norm` in training, for (N, C) or (N, C, ...)."""
    num_values = batch.numel() // batch.shape[1]
    with torch.no_grad():
        batch_float = batch.float()
        total_C, total_squares_C = channel_sums.sums(
            batch_float, batch_float * batch_float, reused=True
        )
        mean_C = total_C / num_values
        var_C = (total_squares_C / num_values - mean_C * mean_C).clamp(min=0)
        invstd_C = torch.rsqrt(var_C + eps)
        if running_mean_C is not None and running_var_C is not None:
            running_mean_C.mul_(1 - momentum).add_(mean_C, alpha=momentum)
            unbiased_C = var_C * (num_values / max(num_values - 1, 1))
            running_var_C.mul_(1 - momentum).add_(unbiased_C, alpha=momentum)
    inputs = (batch, weight_C, bias_C, mean_C, invstd_C)
    out = _apply(_HalfBatchNorm, *inputs, False)
    setattr(out, _BATCH_NORM_INPUTS, (inputs, out._version))
    return out


def _saved_inputs(result: torch.Tensor, attribute: str) -> tuple[torch.Tensor, ...] | None:
    """Return the inputs that a result was computed from; None if it was written to since."""
    inputs: tuple[torch.Tensor, ...] | None
    inputs, version = getattr(result, attribute, (None, 0))
    return inputs if result._version == version else None


def relu(batch: torch.Tensor) -> torch.Tensor:
    """Compute `torch.relu`; behind `batch_norm` both share one backward pass."""
    inputs = _saved_inputs(batch, _BATCH_NORM_INPUTS)
    if inputs is None:
        return _apply(_HalfRelu, batch)
    out = _apply(_HalfBatchNorm, *inputs, True)
    setattr(out, _RELU_INPUTS, (inputs, out._version))
    return out


def relu_in_place(batch: torch.Tensor) -> torch.Tensor:
    """Compute `torch.relu_`, with `relu`'s backward pass where that is possible."""
    if batch.grad_fn is None or batch._is_view():
        return torch.relu_(batch)
    inputs = _saved_inputs(batch, _BATCH_NORM_INPUTS)
    out = relu(batch)
    # Detached from its history, through which autograd would pass a gradient of zeros otherwise.
    batch.detach_().copy_(out)
    if inputs is not None:
        setattr(batch, _RELU_INPUTS, (inputs, batch._version))
    return batch


def supports_max_pool2d(
    batch: torch.Tensor, size: Sequence[int], dilation: Sequence[int], ceil_mode: bool
) -> bool:
    """Return whether `max_pool2d` takes this: (N, C, H, W), 16 bits, windows up to 255 elements."""
    plain = batch.dim() == 4 and set(dilation) == {1} and not ceil_mode
    return plain and supports(batch) and math.prod(_pair(size)) <= 255


def is_batch_norm_relu(batch: torch.Tensor) -> bool:
    """Return whether a tensor is ReLU of `batch_norm`, and was not written to since."""
    return _saved_inputs(batch, _RELU_INPUTS) is not None


def max_pool2d(
    batch: torch.Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """Compute `torch.max_pool2d` of what `supports_max_pool2d` accepts.

    Behind `batch_norm` and `relu` the three share one backward pass.
    """
    windows = PoolWindows(_pair(size), _pair(stride or size), _pair(padding), batch.shape)
    inputs = _saved_inputs(batch, _RELU_INPUTS)
    if inputs is not None:
        return _apply(_HalfBatchNormPool, *inputs, windows)
    return _apply(_HalfMaxPool, batch, windows)


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return value[0], value[-1]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _HalfBatchNorm(torch.autograd.Function):
    """Normalisation by the batch's own statistics, with ReLU if asked to."""

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, relu: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(batch, weight_C, bias_C, mean_C, invstd_C)
        ctx.relu = relu
        centered = batch.float() - _per_channel(mean_C, batch)
        normal = _normal(centered, weight_C, bias_C, invstd_C).to(batch.dtype)
        return normal.relu() if relu else normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, bias_C, mean_C, invstd_C = ctx.saved_tensors
        centered = batch.float() - _per_channel(mean_C, batch)
        grad_for_sum = grad_for_product = grad_for_batch = gradient.float()
        if ctx.relu:
            normal = _normal(centered, weight_C, bias_C, invstd_C)
            grad_for_sum, grad_for_product, grad_for_batch = _masked_gradients(
                gradient, normal, centered
            )
        normalised = centered * _per_channel(invstd_C, batch)
        grad_bias_C, grad_weight_C = channel_sums.sums(grad_for_sum, grad_for_product * normalised)
        grad_batch = _input_gradient(
            batch, grad_for_batch, normalised, grad_weight_C, grad_bias_C, weight_C * invstd_C
        )
        return grad_batch, grad_weight_C, grad_bias_C, None, None, None


def _input_gradient(
    batch: torch.Tensor, grad_normal: torch.Tensor, normalised: torch.Tensor,
    grad_weight_C: torch.Tensor, grad_bias_C: torch.Tensor, scale_C: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute the gradient of BatchNorm's input from that of its result.

    The means are computed at the batch's full shape: a computation on a vector of channels, between
    the sums and this, would be a kernel of its own.
    """
    num_values = batch.numel() // batch.shape[1]
    through_statistics = _per_channel(grad_bias_C, batch) + normalised * _per_channel(
        grad_weight_C, batch
    )
    return (
        (grad_normal - through_statistics * (1 / num_values)) * _per_channel(scale_C, batch)
    ).to(batch.dtype)


def _normal(
    centered: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, invstd_C: torch.Tensor
) -> torch.Tensor:
    return centered * _per_channel(weight_C * invstd_C, centered) + _per_channel(bias_C, centered)


def _masked_gradients(
    gradient: torch.Tensor, normal: torch.Tensor, centered: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient where ReLU let its input pass, else 0: three times, in float32.

    The mask is computed from BatchNorm's input, which every user of these reads anyway. Were it one
    and the same operation for all three, or did the first user not read that input for 0 times
    its value, XLA would rather compute the mask in the forward pass, write it and read it back.
    """
    threshold = _ROUNDS_TO_ZERO[gradient.dtype]
    threshold_like, minus_threshold_like = (
        scalar_like(threshold, normal),
        scalar_like(-threshold, normal),
    )
    zero = scalar_like(0, gradient)
    gradient_float = gradient.float()
    return (
        torch.where(normal > threshold_like, gradient_float + 0 * centered, zero.float()),
        torch.where(-normal < minus_threshold_like, gradient_float, zero.float()),
        torch.where(normal <= threshold_like, zero, gradient).float(),
    )


def _per_channel(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


class _HalfRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        out = batch.clamp(min=0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        # Not `out > 0`: XLA rewrites that in terms of the ReLU's input, a sum of two tensors at a
        # residual's end, and reads both.
        return torch.where(out != scalar_like(0, out), gradient, scalar_like(0, gradient))


class _HalfMaxPool(torch.autograd.Function):
    """Max-pooling that saves each window's winning position for backward, as a byte."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, windows: PoolWindows) -> torch.Tensor:
        ctx.windows = windows
        maxima, winners = windows.max_and_position(batch)
        ctx.save_for_backward(winners)
        return maxima

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (winners,) = ctx.saved_tensors
        return ctx.windows.input_gradient(gradient, winners).to(gradient.dtype), None


class _HalfBatchNormPool(torch.autograd.Function):
    """Normalisation by the batch's own statistics, then ReLU, then max-pooling.

    The result is BatchNorm and ReLU of each window's largest input, or of its smallest where the
    weight is negative: both round equal values alike, and keep the order otherwise. So what they
    make of the other inputs need not be computed, written and read.
    """

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor,
        mean_C: torch.Tensor, invstd_C: torch.Tensor, windows: PoolWindows,
    ) -> torch.Tensor:  # fmt: skip
        is_negative_C = weight_C < scalar_like(0, weight_C)
        sign_C = torch.where(is_negative_C, scalar_like(-1, batch), scalar_like(1, batch))
        extremes, winners = windows.max_and_position(batch * _per_channel(sign_C, batch))
        extremes = extremes * _per_channel(sign_C, batch)
        ctx.windows = windows
        centered = extremes.float() - _per_channel(mean_C, batch)
        out = _normal(centered, weight_C, bias_C, invstd_C).to(batch.dtype).relu()
        ctx.save_for_backward(batch, weight_C, mean_C, invstd_C, extremes, winners, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight_C, mean_C, invstd_C, extremes, winners, out = ctx.saved_tensors
        gradient = torch.where(out != scalar_like(0, out), gradient, scalar_like(0, gradient))
        gradient_float = gradient.float()
        mean, invstd = _per_channel(mean_C, batch), _per_channel(invstd_C, batch)
        grad_bias_C, grad_weight_C = channel_sums.sums(
            gradient_float, gradient_float * ((extremes.float() - mean) * invstd)
        )
        grad_normal = ctx.windows.input_gradient(gradient, winners)
        grad_batch = _input_gradient(
            batch, grad_normal, (batch.float() - mean) * invstd, grad_weight_C, grad_bias_C,
            weight_C * invstd_C,
        )  # fmt: skip
        return grad_batch, grad_weight_C, grad_bias_C, None, None, None
