"""Ratios of paired runs and what they allow to say."""

import math
import statistics
from collections.abc import Iterable, Sequence


def mean_with_interval(
    ratios: Sequence[float], confidence: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """The geometric mean of one or more ratios and its interval by Student's t of their logarithms.

    Two ratios hardly bound it and one does not at all. Unlike the bootstrap of the median, it
    covers what it says it covers with few rounds (benchmarks/interval_coverage.py).
    """
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), (0.0, math.inf)
    half = t_quantile(confidence, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    # Ratios far apart, twice measured: keep the ends within what a float and JSON can hold.
    half = min(half, 100.0)
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def t_quantile(confidence: float, degrees: int) -> float:
    """How many standard errors around a mean hold the truth with `confidence`."""
    from scipy import special  # takes a moment, and few commands need it

    # Rounded, so that the same records give the same report with every scipy.
    return round(float(special.stdtrit(degrees, (1 + confidence) / 2)), 6)


def in_most(values: Iterable[float]) -> float:
    """The size that three of four values have or exceed, with its sign.

    What is wrong in all steps is found by it as by the median, and jumps from rounding, which
    one program may have in every second step and another in every third, are not.
    """
    by_size = sorted(values, key=abs)
    return by_size[(len(by_size) - 1) // 4]
