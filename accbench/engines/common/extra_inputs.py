"""Tensors that a forward pass reads in addition to its model and its batch.

An engine that captures a step as a function of its inputs would treat such tensors as constants.
Code that has a model read some, as the numerics pass does with the random numbers of dropout,
registers them here, and such an engine makes inputs of them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass
class TensorSource:
    """Tensors that forward passes take from a list, one after the other."""

    tensors: list[torch.Tensor]
    """Read in order; may be replaced between steps."""
    position: list[int]
    """A list of one number: how many were taken since `tensors` was filled."""


sources: list[TensorSource] = []


@contextlib.contextmanager
def registered(source: TensorSource) -> Iterator[None]:
    """Register a source in the block."""
    sources.append(source)
    try:
        yield
    finally:
        sources.remove(source)


def tensors() -> list[torch.Tensor]:
    """Return the tensors that all sources hold now."""
    return [tensor for source in sources for tensor in source.tensors]


@contextlib.contextmanager
def replaced(replacements: list[torch.Tensor]) -> Iterator[list[int]]:
    """Have a forward pass read other tensors from the start, in the order of `tensors`.

    Yields:
        A list that holds, after the block, how many tensors were read of each source.
    """
    saved = [(list(source.tensors), source.position[0]) for source in sources]
    rest, num_read = iter(replacements), list[int]()
    try:
        for source in sources:
            source.tensors[:] = [next(rest) for _ in source.tensors]
            source.position[0] = 0
        yield num_read
        num_read += [source.position[0] for source in sources]
    finally:
        for source, (tensors_before, position) in zip(sources, saved, strict=True):
            source.tensors[:] = tensors_before
            source.position[0] = position
