"""The largest batch that fits: memory grows nearly in a line with it, so few compilations do."""

from collections.abc import Callable
from typing import Any

from accbench.errors import RequestError

_MOST_TRIES = 12


def search(
    peak_bytes: Callable[[int], int], known: dict[int, int], memory_bytes: int, multiple_of: int
) -> dict[str, Any]:
    """Batch sizes tried, and the largest that fits: the next multiple does not.

    Args:
        peak_bytes: batch size -> bytes that its step needs; raises RequestError where the step
            cannot be compiled, which counts as not fitting.
        known: those that were compiled before.
        multiple_of: only such batch sizes are tried.
    """
    tried = dict(known)
    limit = None
    for _ in range(_MOST_TRIES):
        low = max((b for b, need in tried.items() if need <= memory_bytes), default=0)
        high = min((b for b, need in tried.items() if need > memory_bytes and b > low), default=0)
        step = low - low % multiple_of  # the largest multiple that is known to fit, or below it
        if high and high <= step + multiple_of:
            break
        guess = _between(tried, low, high, memory_bytes, multiple_of)
        if guess in tried:
            break
        try:
            tried[guess] = peak_bytes(guess)
        except RequestError as error:
            limit = f"batch {guess}: {error}"
            tried[guess] = 2**63
    fitting = [b for b, need in tried.items() if need <= memory_bytes]
    return {
        "largest": max(fitting, default=None),
        "tried": [
            [b, need if need < 2**63 else None, need <= memory_bytes]
            for b, need in sorted(tried.items())
        ],
        "limit": limit,
    }


def _between(
    tried: dict[int, int], low: int, high: int, memory_bytes: int, multiple_of: int
) -> int:
    """A multiple between those that fit and those that do not, where a line crosses the limit."""
    points = sorted((b, need) for b, need in tried.items() if need < 2**63)
    if len(points) > 1:
        # By the two nearest to the limit.
        (b0, n0), (b1, n1) = sorted(
            sorted(points, key=lambda point: abs(point[1] - memory_bytes))[:2]
        )
        slope = (n1 - n0) / (b1 - b0)
        guess = int(b0 + (memory_bytes - n0) / slope) if slope > 0 else 2 * b1
    else:
        guess = int(points[0][0] * memory_bytes / max(points[0][1], 1)) if points else multiple_of
    guess -= guess % multiple_of
    floor = low - low % multiple_of + multiple_of
    ceiling = high - 1 - (high - 1) % multiple_of if high else max(floor, 4 * max(low, multiple_of))
    return max(floor, min(guess, ceiling))
