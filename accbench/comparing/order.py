"""The order in which each round measures the rows: random, and balanced over the rounds."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def round_orders(rows: Sequence[T], num_rounds: int, seed: int | None) -> Iterator[list[T]]:
    """Yield the rows in the order of each round; in their given order if `seed` is None.

    Over as many rounds as there are rows, each row is measured once at every position, and over
    twice as many each row follows every other equally often (Williams, Experimental designs
    balanced for the estimation of residual effects of treatments, 1949). Otherwise a row would
    look slow because the machine is slower at the end of a round.
    """
    if seed is None or not rows:
        yield from ([*rows] for _ in range(num_rounds))
        return
    generator, size = random.Random(seed), len(rows)
    indices = generator.sample(range(size), size)
    # 0, n-1, 1, n-2, ...: each difference between neighbours, once.
    zigzag = [*chain.from_iterable(zip(range(size), reversed(range(size)), strict=True))][:size]
    shifts: list[int] = []
    for number in range(num_rounds):
        if not shifts:
            shifts = generator.sample(range(size), size)
            zigzag = zigzag[::-1] if number else zigzag
        shift = shifts.pop()
        yield [rows[indices[(position + shift) % size]] for position in zigzag]
