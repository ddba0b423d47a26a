"""Looks at a comparison after each round: intervals that stay right, and when a row is decided.

Looking again and again would find a difference by chance. So each look has a level of its own, such
that all of them together err as often as one: Lan and DeMets, Discrete sequential boundaries for
clinical trials, 1983, with the spending function alpha t^2 of Kim and DeMets, 1987, which lies
between Pocock's and O'Brien and Fleming's. Intervals are repeated confidence intervals (Jennison
and Turnbull, 1989): Student's t at the look's level, which with a known variance would be exact
(docs/compare.md has simulations).
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

from accbench.report.statistics import direction, t_quantile

FIRST_LOOK = 3
"""Rounds before the first look."""
# Student's t in the place of the normal distribution errs a little more often in few rounds:
# spent by all looks together, this holds 5 %.
_ALPHA = 0.035
# From so many rounds on, the largest and the smallest ratio are set aside: one bad round then rules
# nothing.
_TRIMMED_FROM = 8
_GRID = 1501


@cache
def levels(repeats: int) -> dict[int, float]:
    """Return the two-sided level of the look after each round: rounds -> level.

    The rows that no look has decided have a density, of the sum of their rounds' results. Each look
    cuts off its tails, so wide that they hold what it may spend (Armitage, McPherson and Rowe,
    Repeated significance tests on accumulating data, 1969).
    """
    import numpy as np  # these take a moment, and few commands need them
    from scipy import special

    first = min(FIRST_LOOK, repeats)
    spent = _ALPHA * (first / repeats) ** 2
    z = float(special.ndtri(1 - spent / 2))
    sums = np.linspace(-z, z, _GRID) * math.sqrt(first)
    density = np.exp(-(sums**2) / (2 * first)) / math.sqrt(2 * math.pi * first)
    result = {first: _level(z)}
    for num_rounds in range(first + 1, repeats + 1):
        mass = density * np.gradient(sums)
        mass[[0, -1]] /= 2
        may_spend = _ALPHA * (num_rounds / repeats) ** 2 - spent
        z = _boundary(sums, mass, num_rounds, may_spend)
        new_sums = np.linspace(-z, z, _GRID) * math.sqrt(num_rounds)
        # One more round adds a standard normal number.
        density = np.exp(-((new_sums[:, None] - sums[None, :]) ** 2) / 2) @ mass
        density /= math.sqrt(2 * math.pi)
        sums, spent = new_sums, spent + may_spend
        result[num_rounds] = _level(z)
    return result


def _boundary(sums: Any, mass: Any, num_rounds: int, may_spend: float) -> float:
    """Return how many standard deviations cut off `may_spend` after one more round."""
    from scipy import special

    low, high = 0.0, 10.0
    for _ in range(50):
        z = (low + high) / 2
        edge = z * math.sqrt(num_rounds)
        outside = special.ndtr(-edge - sums) + special.ndtr(sums - edge)
        low, high = (z, high) if float((mass * outside).sum()) > may_spend else (low, z)
    return z


def _level(z: float) -> float:
    # Rounded, so that the same records give the same report everywhere.
    return round(math.erfc(z / math.sqrt(2)), 6)


def mean_with_interval(ratios: Sequence[float], repeats: int) -> tuple[float, tuple[float, float]]:
    """Compute the mean of ratios after any of the looks, and its repeated confidence interval.

    It is the geometric mean; from eight rounds on without the largest and the smallest ratio, with
    the interval of a trimmed mean (Yuen, The two-sample trimmed t for unequal population variances,
    1974).

    Args:
        ratios: of the rounds so far.
        repeats: rounds after which the comparison ends at the latest.
    """
    logs = sorted(math.log(ratio) for ratio in ratios)
    num = len(logs)
    if num < 2:
        return math.exp(statistics.fmean(logs)), (0.0, math.inf)
    # Before the first look nothing is decided, and the interval says so by its width.
    level = levels(max(repeats, num)).get(num, _ALPHA / 100)
    trim = 1 if num >= _TRIMMED_FROM else 0
    middle_logs = logs[trim : num - trim]
    winsorized = [min(max(log, middle_logs[0]), middle_logs[-1]) for log in logs]
    left = len(middle_logs)
    middle = statistics.fmean(middle_logs)
    error = statistics.stdev(winsorized) * math.sqrt((num - 1) / (left * (left - 1)))
    half = min(t_quantile(1 - level, left - 1) * error, 100.0)
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def is_decided(ratios: Sequence[float], repeats: int, min_effect: float) -> bool:
    """Return whether more rounds can be spared: a direction is shown, or that there is none.

    That there is none is shown by an interval within `min_effect` of 1 to both sides.
    """
    if len(ratios) < FIRST_LOOK:
        return False
    speedup, interval = mean_with_interval(ratios, repeats)
    low, high = interval
    same = low > 1 / (1 + min_effect) and high < 1 + min_effect
    return same or direction(speedup, interval, min_effect) != 0


def rounds_until_decided(
    ratios: Sequence[float | None], repeats: int, min_effect: float
) -> int | None:
    """Return the number of rounds after which a row was decided; None if it was not.

    Args:
        ratios: by round; None where the row or the baseline has no speed, which decides nothing.
        repeats: rounds at most.
        min_effect: the smallest difference that matters.
    """
    for num_rounds in range(FIRST_LOOK, len(ratios) + 1):
        so_far = [ratio for ratio in ratios[:num_rounds] if ratio is not None]
        if len(so_far) == num_rounds and is_decided(so_far, repeats, min_effect):
            return num_rounds
    return None
