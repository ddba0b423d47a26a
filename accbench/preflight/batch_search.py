"""Search for the largest batch that fits; memory grows almost linearly, so few tries suffice."""

from collections.abc import Callable
from typing import Any

from accbench.errors import RequestError

_MAX_TRIES = 12


def search(
    peak_bytes: Callable[[int], int], known: dict[int, int], memory_bytes: int, multiple_of: int
) -> dict[str, Any]:
    """Search for the largest batch size that fits into memory while the next multiple does not.

    Args:
        peak_bytes: batch size -> bytes that its step needs; raises RequestError if the step cannot
            be compiled, which counts as not fitting.
        known: batch size -> bytes, as compiled before.
        memory_bytes: memory of the GPU.
        multiple_of: batch sizes to try are multiples of this.

    Returns:
        `largest` (None if none fits), `tried` as [batch size, bytes, fits], and `limit`, the last
        compilation's error.
    """
    tried = dict(known)
    limit = None
    for _ in range(_MAX_TRIES):
        low = max((b for b, need in tried.items() if need <= memory_bytes), default=0)
        high = min((b for b, need in tried.items() if need > memory_bytes and b > low), default=0)
        step = low - low % multiple_of  # the largest multiple not above a batch that fits
        if high and high <= step + multiple_of:
            break
        guess = _next_guess(tried, low, high, memory_bytes, multiple_of)
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


def _next_guess(
    tried: dict[int, int], low: int, high: int, memory_bytes: int, multiple_of: int
) -> int:
    """Return the multiple at which a line through two measured points reaches `memory_bytes`."""
    points = sorted((b, need) for b, need in tried.items() if need < 2**63)
    if len(points) > 1:
        # The two points nearest to the limit define the line.
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
