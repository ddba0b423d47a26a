"""BatchNorm, ReLU, max-pooling and attention in 16 bits, spelled so that XLA moves few bytes.

They compute what eager computes on CUDA and round where it rounds: results in the batch's type,
statistics and gradients of statistics in float32. Each is a function of its own for autograd, for
what costs is the backward pass. torch_xla's has a ReLU write the masked gradient for BatchNorm's
two passes to read, keeps masks and BatchNorm's input for it, and max-pooling's indices in 32 bits.
How the spellings came about, with the bytes of each: docs/measured.md.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

TYPES = (torch.float16, torch.bfloat16)
# What is not larger than this rounds to 0 or below: half of the smallest float16. bfloat16 has
# float32's range.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
# So many rows of a matrix XLA adds up in one kernel on a GPU, and so few along with something else.
_ROWS, _FEW = 4096, 31
# Sums that keep a GPU busy: 32 a block, a block for each of its processors.
_ENOUGH = 4096
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
        total_C, of_squares_C = _sums(wide, wide * wide, again=True)
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
    windows = _Windows(_pair(size), _pair(stride or size), _pair(padding), given.shape)
    origin = _origin(given, _ORIGIN_OF_RELU)
    if origin is not None:
        return _apply(_BatchNormPool, *origin, windows)
    return _apply(_MaxPool, given, windows)


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return value[0], value[-1]


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
        centered = batch.float() - _wide(mean_C, batch)
        for_sum = for_product = for_batch = gradient.float()
        if ctx.relu:
            normal = _normal(centered, weight_C, bias_C, invstd_C)
            for_sum, for_product, for_batch = _masked(gradient, normal, centered)
        normalised = centered * _wide(invstd_C, batch)
        of_bias_C, of_weight_C = _sums(for_sum, for_product * normalised)
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
    above, below = _number(least, normal), _number(-least, normal)
    zero = _number(0, gradient)
    wide = gradient.float()
    return (
        torch.where(normal > above, wide + 0 * centered, zero.float()),
        torch.where(-normal < below, wide, zero.float()),
        torch.where(normal <= above, zero, gradient).float(),
    )


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A number in the type of what it is compared with or put in place of: () .

    torch_xla would compare in float64 or int64 with one of Python's.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _wide(vector_C: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return vector_C.view(1, -1, *[1] * (batch.dim() - 2))


def _sums(*of: torch.Tensor, again: bool = False) -> list[torch.Tensor]:
    """The sum of each over all but dimension 1: in two stages, the second of all at once.

    XLA would cut each sum in two by itself, and launch the second stage of each alone.

    Args:
        again: whether more than one value follows from a sum. A second stage of few numbers XLA
            then computes with what follows, in one kernel.
    """
    num_samples, num_channels = of[0].shape[:2]
    num_places = math.prod(of[0].shape[2:])
    few = _few_sums(num_samples, num_channels, num_places) if again else None
    # Of places so far apart, for one kernel adds up no more of them.
    apart = next(n for n in _divisors(num_places) if num_places // n <= _ROWS)
    parts = []
    for one in of:
        if few is None:
            places = one.reshape(num_samples, num_channels, -1, apart)
            parts.append(places.sum(2).movedim(2, 1).reshape(-1, num_channels))
            continue
        together, at_once = few
        groups = one.reshape(-1, at_once, together // at_once, num_channels, num_places)
        parts.append(functools.reduce(torch.add, groups.unbind(1)).sum((1, 3)))
    return list(torch.cat(parts, dim=1).sum(0).split(num_channels))


def _few_sums(num_samples: int, num_channels: int, num_places: int) -> tuple[int, int] | None:
    """(samples that are added up together, samples of these in one number from the start), so that
    there are few sums, but enough to keep a GPU busy."""
    divisors = _divisors(num_samples)
    for together in divisors:
        num_groups = num_samples // together
        if num_groups <= _FEW and num_groups * num_channels >= _ENOUGH:
            # More of them XLA would write before it adds them up.
            for at_once in (1, 2, 4):
                if together % at_once == 0 and together // at_once * num_places <= _ROWS:
                    return together, at_once
    return None


def _divisors(number: int) -> list[int]:
    """From 1 on."""
    return [n for n in range(1, number + 1) if number % n == 0]


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
        dropped = torch.native_dropout(weights, dropout_p, True)[1]
        kept = torch.where(dropped, weights, _number(0, weights))
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
            counts = kept != _number(0, kept)
            of_weights = torch.where(counts, of_weights, _number(0, of_weights))
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
        # Not `out > 0`: XLA takes that back to what the ReLU was given, a sum of two tensors at a
        # residual's end, and reads both.
        return torch.where(out != _number(0, out), gradient, _number(0, gradient))


class _MaxPool(torch.autograd.Function):
    """What is kept for the backward pass is which place of each window won, as a byte."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, windows: "_Windows") -> torch.Tensor:
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
        mean_C: torch.Tensor, invstd_C: torch.Tensor, windows: "_Windows",
    ) -> torch.Tensor:  # fmt: skip
        turned_C = weight_C < _number(0, weight_C)
        sign_C = torch.where(turned_C, _number(-1, batch), _number(1, batch))
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
        gradient = torch.where(out != _number(0, out), gradient, _number(0, gradient))
        wide, (mean, invstd) = gradient.float(), (_wide(v, batch) for v in (mean_C, invstd_C))
        of_bias_C, of_weight_C = _sums(wide, wide * ((best.float() - mean) * invstd))
        of_normal = ctx.windows.spread(gradient, won)
        of_batch = _of_batch(
            batch, of_normal, (batch.float() - mean) * invstd, of_weight_C, of_bias_C,
            weight_C * invstd_C,
        )  # fmt: skip
        return of_batch, of_weight_C, of_bias_C, None, None, None


class _Windows:
    """Where the windows of a pooling lie in its padded input; places count row by row."""

    def __init__(
        self, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
        shape: torch.Size,
    ) -> None:  # fmt: skip
        self.size, self.stride, self.padding, self.shape = size, stride, padding, shape
        self.num_places = size[0] * size[1]
        self.padded = [length + 2 * more for length, more in zip(shape[2:], padding, strict=True)]
        self.num_windows = [
            (length - places) // step + 1
            for length, places, step in zip(self.padded, size, stride, strict=True)
        ]

    def seen_by(self, place: int) -> list[tuple[int, int, int]]:
        """(start, end, step) of rows and of columns that this place of all windows sees."""
        offsets = divmod(place, self.size[1])
        return [
            (offset, offset + step * (number - 1) + 1, step)
            for offset, step, number in zip(offsets, self.stride, self.num_windows, strict=True)
        ]

    def largest(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each window, and the place that has it first, as in torch, or a NaN.

        The place is found anew, and not as what equals the largest: XLA may compute what was given
        twice, and round otherwise.
        """
        above, left = self.padding
        padded = functional.pad(given, (left, left, above, above), value=float("-inf"))
        most = won = None
        for place in range(self.num_places):
            rows, columns = self.seen_by(place)
            seen = padded[:, :, slice(*rows), slice(*columns)]
            if most is None or won is None:
                most, won = seen, torch.zeros_like(seen, dtype=torch.uint8)
                continue
            better = (seen > most) | (seen != seen)
            most = torch.where(better, seen, most)
            won = torch.where(better, torch.full_like(won, place), won)
        assert won is not None
        return torch.max_pool2d(given, self.size, self.stride, self.padding), won

    def spread(self, gradient: torch.Tensor, won: torch.Tensor) -> torch.Tensor:
        """The gradient of what was pooled, in float32, from that of each window's largest."""
        num, channels, height, width = self.shape
        num_rows, (padded_height, padded_width) = gradient.shape[2], self.padded
        wide, total = gradient.float(), None
        for place in range(self.num_places):
            rows, columns = self.seen_by(place)
            share = torch.where(won == _number(place, won), wide, _number(0, wide))
            # The reverse of taking a slice: XLA has it as padding between elements.
            share = torch.ops.aten.slice_backward(
                share, [num, channels, num_rows, padded_width], 3, *columns
            )
            share = torch.ops.aten.slice_backward(
                share, [num, channels, padded_height, padded_width], 2, *rows
            )
            total = share if total is None else total + share
        assert total is not None
        above, left = self.padding
        return total[:, :, above : above + height, left : left + width]
