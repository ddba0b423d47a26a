"""Sums over all dimensions but the channels, as XLA computes them in few kernels on a GPU."""

import functools
import math

import torch

# So many rows of a matrix XLA adds up in one kernel on a GPU, and so few along with something else.
_ROWS, _FEW = 4096, 31
# Sums that keep a GPU busy: 32 a block, a block for each of its processors.
_ENOUGH = 4096


def sums(*of: torch.Tensor, again: bool = False) -> list[torch.Tensor]:
    """The sum of each over all but dimension 1: in two stages, the second of all at once.

    XLA would cut each sum in two by itself, and launch the second stage of each alone.

    Args:
        again: whether more than one value follows from a sum. A second stage of few numbers XLA
            then computes with what follows, in one kernel.
    """
    num_samples, num_channels = of[0].shape[:2]
    num_places = math.prod(of[0].shape[2:])
    few = _few_sums(num_samples, num_channels, num_places) if again else None
    apart = _apart(num_places)
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


@functools.cache
def _apart(num_places: int) -> int:
    """How far apart places are that are added up in a first sum, for one kernel has its limit."""
    return next(n for n in _divisors(num_places) if num_places // n <= _ROWS)


@functools.cache
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
