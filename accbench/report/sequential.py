"""Looks at a comparison after each round: intervals that stay right, and when a row is decided.

Looking again and again would find a difference by chance. So each look has a level of its own, such
that all of them together err as often as one: Lan and DeMets, Discrete sequential boundaries for
clinical trials, 1983, with the spending function alpha t^2 of Kim and DeMets, 1987, which lies
between Pocock's and O'Brien and Fleming's. Intervals are repeated confidence intervals (Jennison
and Turnbull, 1989): Student's t at the look's level, which with a known variance would be exact
(docs/compare.md has simulations).

Two rounds say too little of how much rounds scatter for Student's t. A look after them takes a
large scatter for granted, and so decides rows that are far from the baseline, and no others.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from accbench.report.statistics import direction, is_too_wide, t_quantile

FIRST_LOOK = 3
"""Rounds before the first look whose interval follows from the rounds alone."""
FAR_LOOK = 2
"""Rounds before the look at rows that are far from the baseline."""
FAR_SCATTER = 0.13
"""Standard deviation of the logarithm of a round's ratio that this look takes for granted. Where
windows take turns it has been 0.02 to 0.04; where runs follow each other, up to 0.17 on a shared
machine."""
FAR_Z = 3.72
"""Standard deviations that this look demands: it calls two equal rows different once in 5,000
times, if they scatter so much."""
# Student's t in the place of the normal distribution errs a little more often in few rounds:
# spent by all looks together, these hold 5 % (docs/compare.md): where there are no rounds beyond
# `repeats`, and where there are, up to `repeats` and beyond it.
_ALPHA = 0.035
_ALPHA_UNTIL_REPEATS, _ALPHA_BEYOND = 0.032, 0.008
TRIMMED_OF = 8
"""Rounds of which the largest and the smallest ratio are set aside, so that a bad one rules
nothing; of twice as many two at each end."""
_GRID = 1501


def _spent(num_rounds: int, repeats: int, max_repeats: int) -> float:
    """Return what the looks may have erred after so many rounds: t^2 at first, then evenly."""
    if num_rounds > repeats:
        share = (num_rounds - repeats) / (max_repeats - repeats)
        return _ALPHA_UNTIL_REPEATS + _ALPHA_BEYOND * share
    alpha = _ALPHA if max_repeats == repeats else _ALPHA_UNTIL_REPEATS
    return alpha * (num_rounds / repeats) ** 2


@cache
def levels(repeats: int, max_repeats: int) -> dict[int, float]:
    """Return the two-sided level of the look after each round: rounds -> level.

    The rows that no look has decided have a density, of the sum of their rounds' results. Each look
    cuts off its tails, so wide that they hold what it may spend (Armitage, McPherson and Rowe,
    Repeated significance tests on accumulating data, 1969). Which rows go on beyond `repeats` has
    no part in it: those that end before cannot err in a later look.
    """
    import numpy as np  # these take a moment, and few commands need them
    from scipy import special

    first = min(FIRST_LOOK, repeats)
    spent = _spent(first, repeats, max_repeats)
    z = float(special.ndtri(1 - spent / 2))
    sums = np.linspace(-z, z, _GRID) * math.sqrt(first)
    density = np.exp(-(sums**2) / (2 * first)) / math.sqrt(2 * math.pi * first)
    result = {first: _level(z)}
    for num_rounds in range(first + 1, max_repeats + 1):
        mass = density * np.gradient(sums)
        mass[[0, -1]] /= 2
        may_spend = _spent(num_rounds, repeats, max_repeats) - spent
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


def mean_with_interval(
    ratios: Sequence[float], repeats: int, max_repeats: int, looks_for_far: bool = True
) -> tuple[float, tuple[float, float]]:
    """Compute the mean of ratios after any of the looks, and its repeated confidence interval.

    It is the geometric mean; from eight rounds on without the largest and the smallest ratio, of
    sixteen without two at each end, with the interval of a trimmed mean (Yuen, The two-sample
    trimmed t for unequal population variances, 1974).

    Args:
        ratios: of the rounds so far.
        repeats: rounds after which a row ends that has an interval narrow enough for a verdict.
        max_repeats: rounds after which every row ends.
        looks_for_far: whether there is a look after `FAR_LOOK` rounds.
    """
    logs = sorted(math.log(ratio) for ratio in ratios)
    num = len(logs)
    if num < 2:
        return math.exp(statistics.fmean(logs)), (0.0, math.inf)
    if num == FAR_LOOK and looks_for_far:
        return _far_mean_with_interval(logs)
    # Before the first look nothing is decided, and the interval says so by its width.
    level = levels(repeats, max(max_repeats, num)).get(num, _ALPHA / 100)
    trim = num // TRIMMED_OF
    middle_logs = logs[trim : num - trim]
    winsorized = [min(max(log, middle_logs[0]), middle_logs[-1]) for log in logs]
    left = len(middle_logs)
    middle = statistics.fmean(middle_logs)
    error = statistics.stdev(winsorized) * math.sqrt((num - 1) / (left * (left - 1)))
    half = min(t_quantile(1 - level, left - 1) * error, 100.0)
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def _far_mean_with_interval(logs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    middle = statistics.fmean(logs)
    scatter = max(FAR_SCATTER, statistics.stdev(logs))
    half = min(FAR_Z * scatter / math.sqrt(len(logs)), 100.0)
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


class RowEnd(NamedTuple):
    """The end of a row's rounds, as far as its ratios tell by now."""

    num_rounds: int
    is_decided: bool
    """Whether a look found a direction, or that there is none."""


def find_end(
    ratios: Sequence[float | None], repeats: int, max_repeats: int, min_effect: float,
    looks_for_far: bool = True,
) -> RowEnd:  # fmt: skip
    """Return how many rounds a row needs.

    It is decided where its interval shows a direction, or lies within `min_effect` of 1 to both
    sides. Undecided it ends after `repeats` rounds, or later once the interval is not too wide for
    a verdict, and at the latest after `max_repeats`.

    Args:
        ratios: by round; None where the row or the baseline has no speed (yet), after which
            nothing is decided.
        repeats: rounds of a row that nothing decides.
        max_repeats: rounds of a row whose interval stays too wide.
        min_effect: the smallest difference that matters.
        looks_for_far: whether there is a look after `FAR_LOOK` rounds.
    """
    first = FAR_LOOK if looks_for_far else FIRST_LOOK
    for num_rounds in range(min(first, repeats), max_repeats):
        so_far = [ratio for ratio in ratios[:num_rounds] if ratio is not None]
        if len(so_far) < num_rounds:
            return RowEnd(max(num_rounds, repeats), False)
        found = mean_with_interval(so_far, repeats, max_repeats, looks_for_far)
        if num_rounds >= first and _is_decided(*found, min_effect):
            return RowEnd(num_rounds, True)
        if num_rounds >= repeats and not is_too_wide(*found, min_effect):
            return RowEnd(num_rounds, False)
    so_far = [ratio for ratio in ratios[:max_repeats] if ratio is not None]
    is_whole = len(so_far) == max_repeats >= FIRST_LOOK
    last = mean_with_interval(so_far, repeats, max_repeats) if is_whole else None
    return RowEnd(max_repeats, last is not None and _is_decided(*last, min_effect))


def _is_decided(speedup: float, interval: tuple[float, float], min_effect: float) -> bool:
    low, high = interval
    same = low > 1 / (1 + min_effect) and high < 1 + min_effect
    return same or direction(speedup, interval, min_effect) != 0
