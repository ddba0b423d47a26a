"""Ratios of paired runs and what they allow to say."""

from collections.abc import Sequence

import numpy as np

_NUM_RESAMPLES = 9999
_SEED = 0  # the same records give the same interval


def median_with_interval(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median of one or more ratios and its 95 % interval by the percentile bootstrap.

    With the five rounds of the default, the interval is the range of the ratios: a
    median outside all of them has a chance of 2 * 0.5^5, 6 %.
    """
    values = np.asarray(ratios, dtype=float)
    median = float(np.median(values))
    if values.size < 2 or np.all(values == values[0]):
        return median, (float(values.min()), float(values.max()))
    from scipy import stats  # takes half a second

    result = stats.bootstrap(
        (values,), np.median, n_resamples=_NUM_RESAMPLES, confidence_level=0.95,
        method="percentile", rng=np.random.default_rng(_SEED),
    )  # fmt: skip
    low, high = result.confidence_interval
    return median, (float(low), float(high))
