"""Tensors in float64, a piece at a time.

What the numerics pass computes in float64 is elementwise, or a sum. In pieces that a core's cache
holds, ten times as fast as with whole tensors (measured with AdamW's formula and 5 million values,
one thread), a wide copy of a model is never in memory.
"""

from collections.abc import Iterator, Sequence

import torch

from accbench.distributed.complex_numbers import real

SIZE = 32_000
"""Values of a piece: 256 KB of float64. From 32,768 on torch shares every single operation out to
threads, which then wait for each other: four times the CPU time on a machine that others use."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one dimension, a complex number as two; a view if possible."""
    return real(tensor).reshape(-1)


def in_float64(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield, piece by piece, the values of tensors of one shape in float64.

    Args:
        tensors: at least one, all of one shape.

    Yields:
        For each tensor the values of the same places, (SIZE,) or fewer; complex numbers as pairs.
    """
    flattened = [flat(tensor) for tensor in tensors]
    for start in range(0, flattened[0].numel(), SIZE):
        yield [values[start : start + SIZE].double() for values in flattened]


def square_sum(values: torch.Tensor) -> float:
    """Return the sum of squares of a piece, (N,) in float64."""
    return float(values.square().sum())
