"""Statistics of the ratios of paired runs."""

import math
import statistics
from collections.abc import Iterable, Sequence

# Width of the 95 % interval, as a part of the speedup. Beyond it "no difference shown" would only
# say that no difference could have been shown.
MAX_INTERVAL_WIDTH = 0.25


# The rounds, beyond the first, that a usual scatter counts as much as.
USUAL_DEGREES = 4


def mean_with_interval(
    ratios: Sequence[float], confidence: float = 0.95, usual_scatter: float | None = None
) -> tuple[float, tuple[float, float]]:
    """Compute the geometric mean of ratios, and its confidence interval.

    The interval is Student's t of the ratios' logarithms. Two ratios hardly bound the mean and one
    does not at all. Unlike the bootstrap of the median, the interval covers what it says it covers
    with few rounds (benchmarks/interval_coverage.py).

    Args:
        ratios: of the rounds.
        confidence: how often the interval is to hold the truth, 0..1.
        usual_scatter: the logarithms' standard deviation as it usually is. It is averaged with
            that of the ratios, as if measured in `USUAL_DEGREES` more rounds (the moderated t of
            Smyth, Linear models and empirical Bayes methods, 2004).
    """
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), (0.0, math.inf)
    variance, degrees = statistics.variance(logs), len(logs) - 1
    if usual_scatter is not None:
        of_all = USUAL_DEGREES * usual_scatter**2 + degrees * variance
        degrees += USUAL_DEGREES
        variance = of_all / degrees
    half = t_quantile(confidence, degrees) * math.sqrt(variance / len(logs))
    # Ratios far apart, twice measured: keep the ends within what a float and JSON can hold.
    half = min(half, 100.0)
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def direction(speedup: float, interval: tuple[float, float], min_effect: float) -> int:
    """Return 1 where a speedup is shown to be above 1 by `min_effect`, -1 below it, 0 otherwise."""
    low, high = interval
    if low > 1 and speedup >= 1 + min_effect:
        return 1
    return -1 if high < 1 and speedup <= 1 / (1 + min_effect) else 0


def is_too_wide(speedup: float, interval: tuple[float, float], min_effect: float) -> bool:
    """Return whether an interval without a direction is too wide for "no difference shown"."""
    width = (interval[1] - interval[0]) / speedup
    return direction(speedup, interval, min_effect) == 0 and width > MAX_INTERVAL_WIDTH


def t_quantile(confidence: float, degrees: int) -> float:
    """Return how many standard errors around a mean hold the truth with `confidence`."""
    from scipy import special  # takes a moment, and few commands need it

    # Rounded, so that the same records give the same report with every scipy.
    return round(float(special.stdtrit(degrees, (1 + confidence) / 2)), 6)


def lower_quartile(values: Iterable[float]) -> float:
    """Return the lower quartile by magnitude: three of four values are as large, or larger.

    The value keeps its sign. An error in all steps shows in it as in the median; jumps from
    rounding, which one program may have in every second step and another in every third, do not.
    """
    by_size = sorted(values, key=abs)
    return by_size[(len(by_size) - 1) // 4]


def interquartile_mean_ratio(ratios: Iterable[float]) -> float:
    """Return the geometric mean of ratios without the lowest and highest quarter, rounded down.

    It bears as many ratios that something has disturbed, and scatters less than the median.
    """
    logs = sorted(map(math.log, ratios))
    quarter = len(logs) // 4
    return math.exp(statistics.fmean(logs[quarter : len(logs) - quarter]))
