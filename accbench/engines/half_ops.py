"""BatchNorm, ReLU, max-pooling and attention in 16 bits, spelled so that XLA moves few bytes.

They compute what eager computes on CUDA and round where it rounds: results in the batch's type,
statistics and gradients of statistics in float32. Each is a function of its own for autograd, for
what costs is the backward pass. torch_xla's has a ReLU write the masked gradient for BatchNorm's
two passes to read, keeps masks and BatchNorm's input for it, and max-pooling's indices in 32 bits.
How the spellings came about, with the bytes of each: docs/measured.md.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

TYPES = (torch.float16, torch.bfloat16)
# What is not larger than this rounds to 0 or below: half of the smallest float16. bfloat16 has
# float32's range.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
# Where a result of `batch_norm` keeps what it was computed from, for a ReLU that follows.
_ORIGIN = "_accbench_batch_norm"


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
        total_C, of_squares_C = _sums(wide, wide * wide)
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


def relu(given: torch.Tensor) -> torch.Tensor:
    """`torch.relu`; of a BatchNorm's result, with one backward pass for both."""
    origin, at_version = getattr(given, _ORIGIN, (None, 0))
    if origin is not None and given._version == at_version:  # not written to since
        return _apply(_BatchNorm, *origin, True)
    return _apply(_Relu, given)


def relu_in_place(given: torch.Tensor) -> torch.Tensor:
    """`torch.relu_`; as `relu` where that can be."""
    if given.grad_fn is None or given._is_view():
        return torch.relu_(given)
    out = relu(given)
    # Without the history, or a gradient of zeros would be carried through all of it.
    return given.detach_().copy_(out)


def max_pool2d(
    given: torch.Tensor, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> torch.Tensor:
    """`torch.max_pool2d` of (N, C, H, W), without dilation."""
    return _apply(_MaxPool, given, size, stride, padding)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    dropout_p: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale query key^T) value of (..., T, E); what is kept are the weights, in 16 bits.

    As `torch.nn.functional.scaled_dot_product_attention` without a mask.

    Args:
        dropout_p: part of the weights that is dropped, below 1.
        is_causal: the i-th query sees keys up to the i-th.
    """
    return _apply(_Attention, query, key, value, scale**0.5, dropout_p, is_causal)


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
        num_values = batch.numel() // batch.shape[1]
        centered = batch.float() - _wide(mean_C, batch)
        for_sum = for_product = for_batch = gradient.float()
        if ctx.relu:
            normal = _normal(centered, weight_C, bias_C, invstd_C)
            for_sum, for_product, for_batch = _masked(gradient, normal, centered)
        of_bias_C, of_centered_C = _sums(for_sum, for_product * centered)
        slope_C = of_centered_C * invstd_C * invstd_C / num_values
        of_normal = for_batch - _wide(of_bias_C / num_values, batch)
        of_batch = (of_normal - centered * _wide(slope_C, batch)) * _wide(
            weight_C * invstd_C, batch
        )
        return of_batch.to(batch.dtype), of_centered_C * invstd_C, of_bias_C, None, None, None


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
    zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    wide = gradient.float()
    return (
        torch.where(normal > least, wide + 0 * centered, zero.float()),
        torch.where(-normal < -least, wide, zero.float()),
        torch.where(normal <= least, zero, gradient).float(),
    )


def _wide(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


def _sums(*of: torch.Tensor) -> list[torch.Tensor]:
    """The sum of each over all but dimension 1: in two stages, the second of all at once.

    XLA would cut each sum in two by itself, and launch the second stage of each alone.
    """
    num_channels = of[0].shape[1]
    parts = [one.flatten(2).sum(2) if one.dim() > 2 else one for one in of]
    return list(torch.cat(parts, dim=1).sum(0).split(num_channels))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, root: float,
        dropout_p: float, is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        # Each by its root, as torch has it, or 16 bits might overflow.
        query, key = query * root, key * root
        scores = (query @ key.mT).float()
        if is_causal:
            places = [torch.arange(n, device=scores.device) for n in scores.shape[-2:]]
            scores = scores.masked_fill(places[0][:, None] < places[1], float("-inf"))
        weights = scores.softmax(-1).to(value.dtype)
        ctx.root, ctx.scale = root, 1 / (1 - dropout_p)
        if not dropout_p:
            ctx.save_for_backward(query, key, value, weights)
            return weights @ value
        # What dropout multiplies by goes to the values, which are smaller than the weights.
        zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
        kept = torch.where(torch.native_dropout(weights, dropout_p, True)[1], weights, zero)
        ctx.save_for_backward(query, key, value, weights, kept)
        return kept @ (value * ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, weights, *after_dropout = ctx.saved_tensors
        kept = weights
        # XLA takes a pair of casts away where one follows the other, and would keep the weights in
        # float32 from the forward pass on; they have no sign.
        wide = weights.abs().float()
        if after_dropout:
            (kept,) = after_dropout
            gradient = gradient * ctx.scale
        of_weights = (gradient @ value.mT).float()
        if after_dropout:
            # A weight that is 0 in 16 bits counts for nothing here, dropped or not.
            zero = torch.zeros((), device=gradient.device)
            of_weights = torch.where(kept != 0, of_weights, zero)
        of_scores = wide * (of_weights - (wide * of_weights).sum(-1, keepdim=True))
        of_scores = of_scores.to(gradient.dtype)
        of_query, of_key = of_scores @ key, of_scores.mT @ query
        return of_query * ctx.root, of_key * ctx.root, kept.mT @ gradient, None, None, None


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
        zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        # Not `out > 0`: XLA takes that back to what the ReLU was given, a sum of two tensors at a
        # residual's end, and reads both.
        return torch.where(out != 0, gradient, zero)


class _MaxPool(torch.autograd.Function):
    """What is kept for the backward pass is which place of each window won, as a byte."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, size: tuple[int, int], stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        best = torch.max_pool2d(given, size, stride, padding)
        above, left = padding
        padded = functional.pad(given, (left, left, above, above), value=float("-inf"))
        ctx.windows = _Windows(size, stride, best.shape[2:])
        ctx.padding, ctx.shape = padding, given.shape
        # The first place that has the maximum, as in torch, and that of NaN. Found anew, and not
        # as what equals `best`: XLA may compute what was given twice, and round otherwise.
        most = won = None
        for place in range(ctx.windows.num_places):
            rows, columns = ctx.windows.seen_by(place)
            seen = padded[:, :, slice(*rows), slice(*columns)]
            if most is None or won is None:
                most, won = seen, torch.zeros_like(seen, dtype=torch.uint8)
                continue
            better = (seen > most) | (seen != seen)
            most = torch.where(better, seen, most)
            won = torch.where(better, torch.full_like(won, place), won)
        assert won is not None
        ctx.save_for_backward(won)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (won,) = ctx.saved_tensors
        batch, channels, num_rows, _ = gradient.shape
        (above, left), (height, width) = ctx.padding, ctx.shape[2:]
        padded_height, padded_width = height + 2 * above, width + 2 * left
        zero = torch.zeros((), device=gradient.device)
        total = None
        for place in range(ctx.windows.num_places):
            rows, columns = ctx.windows.seen_by(place)
            share = torch.where(won == place, gradient.float(), zero)
            # The reverse of taking a slice: XLA has it as padding between elements.
            share = torch.ops.aten.slice_backward(
                share, [batch, channels, num_rows, padded_width], 3, *columns
            )
            share = torch.ops.aten.slice_backward(
                share, [batch, channels, padded_height, padded_width], 2, *rows
            )
            total = share if total is None else total + share
        assert total is not None
        inside = total[:, :, above : above + height, left : left + width]
        return inside.to(gradient.dtype), None, None, None


class _Windows:
    """Where the windows of a pooling lie in its padded input; places count row by row."""

    def __init__(
        self, size: tuple[int, int], stride: tuple[int, int], num_windows: torch.Size
    ) -> None:
        self.size, self.stride, self.num_windows = size, stride, num_windows
        self.num_places = size[0] * size[1]

    def seen_by(self, place: int) -> list[tuple[int, int, int]]:
        """(start, end, step) of rows and of columns that this place of all windows sees."""
        offsets = divmod(place, self.size[1])
        return [
            (offset, offset + step * (number - 1) + 1, step)
            for offset, step, number in zip(offsets, self.stride, self.num_windows, strict=True)
        ]
