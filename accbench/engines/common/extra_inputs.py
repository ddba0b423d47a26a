"""Tensors that a forward pass reads beside its model and its batch.

An engine that captures a step as a function of its inputs would take such tensors for constants.
Who has a model read some, as the numerics pass does with the random numbers of dropout, says so
here, and such an engine makes inputs of them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass
class Source:
    """Tensors that forward passes take from a list, one after the other."""

    tensors: list[torch.Tensor]
    """Read by position; may be replaced between steps."""
    position: list[int]
    """One number: how many were taken since the list was filled."""


sources: list[Source] = []


@contextlib.contextmanager
def known(source: Source) -> Iterator[None]:
    """Have engines know of it."""
    sources.append(source)
    try:
        yield
    finally:
        sources.remove(source)


def tensors() -> list[torch.Tensor]:
    """What there is to read now, of all sources."""
    return [tensor for source in sources for tensor in source.tensors]


@contextlib.contextmanager
def replaced(others: list[torch.Tensor]) -> Iterator[list[int]]:
    """Have a forward pass read these from the first on, in the order of `tensors`.

    What it gives holds, afterwards, how many it read of each source.
    """
    kept = [(list(source.tensors), source.position[0]) for source in sources]
    rest, reads = iter(others), list[int]()
    try:
        for source in sources:
            source.tensors[:] = [next(rest) for _ in source.tensors]
            source.position[0] = 0
        yield reads
        reads += [source.position[0] for source in sources]
    finally:
        for source, (tensors_before, position) in zip(sources, kept, strict=True):
            source.tensors[:] = tensors_before
            source.position[0] = position
