"""Sums over all dimensions but the channels, in few kernels of XLA on a GPU."""

import functools
import math

import torch

# The most rows of a matrix that XLA on a GPU sums in one kernel, and in one fused with others.
_MAX_ROWS, _MAX_FUSED_ROWS = 4096, 31
# As many sums keep a GPU busy: 32 a block, one block a multiprocessor.
_MIN_SUMS = 4096


def sums(*tensors: torch.Tensor, reused: bool = False) -> list[torch.Tensor]:
    """Sum each tensor over all dimensions but dimension 1.

    The sum has two stages, and all tensors share the second. XLA would split each sum in two by
    itself, and launch the second stage of each alone.

    Args:
        tensors: (N, C, ...), all of one shape.
        reused: whether more than one value is computed from a sum. XLA then fuses a second stage
            of few numbers with what follows, in one kernel.

    Returns:
        For each tensor its sums (C,).
    """
    num_samples, num_channels = tensors[0].shape[:2]
    num_pixels = math.prod(tensors[0].shape[2:])
    grouping = _sample_grouping(num_samples, num_channels, num_pixels) if reused else None
    stride = _pixel_stride(num_pixels)
    parts = []
    for tensor in tensors:
        if grouping is None:
            pixels = tensor.reshape(num_samples, num_channels, -1, stride)
            parts.append(pixels.sum(2).movedim(2, 1).reshape(-1, num_channels))
            continue
        samples_per_sum, num_elementwise = grouping
        groups = tensor.reshape(
            -1, num_elementwise, samples_per_sum // num_elementwise, num_channels, num_pixels
        )
        parts.append(functools.reduce(torch.add, groups.unbind(1)).sum((1, 3)))
    return list(torch.cat(parts, dim=1).sum(0).split(num_channels))


@functools.cache
def _pixel_stride(num_pixels: int) -> int:
    """Return the least stride between pixels of one first-stage sum that keeps it in one kernel."""
    return next(n for n in _divisors(num_pixels) if num_pixels // n <= _MAX_ROWS)


@functools.cache
def _sample_grouping(
    num_samples: int, num_channels: int, num_pixels: int
) -> tuple[int, int] | None:
    """Choose how to group the samples: few sums, but enough to keep a GPU busy.

    Returns:
        (samples in a sum, how many of these are added elementwise at first); None if no grouping
        fits.
    """
    divisors = _divisors(num_samples)
    for samples_per_sum in divisors:
        num_groups = num_samples // samples_per_sum
        if num_groups <= _MAX_FUSED_ROWS and num_groups * num_channels >= _MIN_SUMS:
            # XLA would materialise more of them before it adds them up.
            for num_elementwise in (1, 2, 4):
                if (
                    samples_per_sum % num_elementwise == 0
                    and samples_per_sum // num_elementwise * num_pixels <= _MAX_ROWS
                ):
                    return samples_per_sum, num_elementwise
    return None


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, from 1 on."""
    return [n for n in range(1, number + 1) if number % n == 0]
