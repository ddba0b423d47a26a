"""In which order a round measures the rows: drawn, and fair to all of them."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def in_turns(rows: Sequence[T], num_rounds: int, seed: int | None) -> Iterator[list[T]]:
    """The order of each round; as given where `seed` is None.

    In as many rounds as there are rows, each row stands once at every place, and in twice
    as many each one comes equally often after every other (Williams, Experimental designs
    balanced for the estimation of residual effects of treatments, 1949). Or a machine that
    is slower at the end of a round would be taken for a slow row.
    """
    if seed is None or not rows:
        yield from ([*rows] for _ in range(num_rounds))
        return
    drawn, size = random.Random(seed), len(rows)
    names = drawn.sample(range(size), size)
    # 0, n-1, 1, n-2, ...: each difference between neighbours, once.
    zigzag = [*chain.from_iterable(zip(range(size), reversed(range(size)), strict=True))][:size]
    shifts: list[int] = []
    for number in range(num_rounds):
        if not shifts:
            shifts = drawn.sample(range(size), size)
            zigzag = zigzag[::-1] if number else zigzag
        shift = shifts.pop()
        yield [rows[names[(place + shift) % size]] for place in zigzag]
