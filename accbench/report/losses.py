"""Do the losses of the timed rounds part from the baseline's? Free training, many steps.

Right engines do not train alike to the bit: rounding grows from step to step, until two runs
differ like runs of two seeds at most. Each round has a seed of its own, the same for all
rows, so the baseline's rounds tell how far seeds go apart, and the differences within a round
how much of that is left between two rows that started alike.
"""

import numpy as np

from accbench.report.comparison import Row
from accbench.report.run import Run
from accbench.report.statistics import t_quantile

# Of a right engine's differences; with the other test fewer than one right engine in 1,000
# is taken for a wrong one, simulated (benchmarks/loss_trials.py).
CONFIDENCE = 0.9995
# What is smaller, in spreads of the seeds, is called no difference however sure it is:
# another compiler rounds in other places.
SMALLEST = 0.5
# In how many spreads the baseline must have learned something for the second test.
LEARNED = 4.0
# Times its own size and spread that the baseline's loss is missed by in every round, for a third
# test: what is that far off is wrong, however it scatters and however little was learned.
FAR = 10.0


def judge(baseline: Row, row: Row) -> str | None:
    """What parts them, for a person; None where nothing was shown, or nothing can be."""
    found = _paired(baseline, row)
    if found is None:
        return None
    own, other, steps = found
    if not part(own, other):
        return None
    return (
        f"losses part from the baseline's: {at_end(own).mean():.3g} in {steps} where "
        f"{baseline.name} has {at_end(other).mean():.3g} (seeds spread by {spread(other):.2g})"
    )


def part(row: np.ndarray, baseline: np.ndarray) -> bool:
    """Of losses (rounds, windows), two rounds or more; a round has one seed in both."""
    unit = spread(baseline)
    if unit == 0:  # the seed changes nothing: there is no yardstick
        return False
    apart = at_end(row) - at_end(baseline)
    error = apart.std(ddof=1) / np.sqrt(apart.size)
    certain = t_quantile(CONFIDENCE, apart.size - 1) * error
    if abs(apart.mean()) > max(SMALLEST * unit, certain):
        return True
    if (abs(apart) > FAR * (abs(at_end(baseline)) + unit)).all():
        return True
    # Two or three differences are rarely certain, but what does not learn at all is seen.
    learned = (baseline[:, 0] - at_end(baseline)).mean()
    far = apart.min() > learned / 2 or apart.max() < -learned / 2
    return bool(far and learned > LEARNED * unit)


def spread(losses: np.ndarray) -> float:
    """Standard deviation over the seeds at a window, quadratic mean of all but the first."""
    later = losses[:, 1:]
    return float(np.sqrt(later.var(axis=0, ddof=1).mean())) if later.size else 0.0


def at_end(losses: np.ndarray) -> np.ndarray:
    """Each round's mean over the last third of its windows, for a single one is noise."""
    return losses[:, -_last_third(losses.shape[1]) :].mean(axis=1)


def _last_third(num_windows: int) -> int:
    return max(1, num_windows // 3)


def _paired(baseline: Row, row: Row) -> tuple[np.ndarray, np.ndarray, str] | None:
    """(losses, the baseline's, steps of the last third) of the rounds that go together."""
    pairs: dict[object, tuple[list[float], list[float]]] = {}
    steps = ""
    for own, other in zip(row.rounds, baseline.rounds, strict=False):
        seed, starts = _seed(own), [window.first_step for window in own.windows]
        alike = seed == _seed(other) and starts == [w.first_step for w in other.windows]
        if seed is None or not alike or not (curve := _curve(own)) or not _curve(other):
            continue
        pairs[seed] = curve, _curve(other)
        end = starts[-1] + own.windows[-1].num_steps
        steps = f"steps {starts[-_last_third(len(starts))]} to {end}"
    if len(pairs) < 2 or len({len(curve) for curve, _ in pairs.values()}) > 1:
        return None
    losses, of_baseline = np.array(list(pairs.values())).swapaxes(0, 1)
    return losses, of_baseline, steps


def _seed(run: Run) -> object:
    return run.header.task.get("seed") if run.header and run.status == "ok" else None


def _curve(run: Run) -> list[float]:
    """A loss for each window; empty if one is missing."""
    # Records of before have the loss of a window's last step alone.
    values = [w.loss if w.mean_loss is None else w.mean_loss for w in run.windows]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
