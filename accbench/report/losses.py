"""Judge whether the losses of the timed rounds diverge from the baseline's in free training.

Right engines do not train alike to the bit: rounding grows from step to step, until two runs
differ like runs of two seeds at most. Each round has a seed of its own, the same for all
rows, so the baseline's rounds tell how far seeds go apart, and the differences within a round
how much of that is left between two rows that started alike.
"""

import numpy as np

from accbench.report.comparison import ComparisonRow
from accbench.report.run import RecordedRun
from accbench.report.statistics import t_quantile

# Confidence of the first test. With the others, fewer than one right engine in 1,000 is taken for a
# wrong one, by simulation (benchmarks/research/loss_trials.py).
CONFIDENCE = 0.9995
# A smaller difference, in spreads of the seeds, does not count however sure it is: another
# compiler rounds in other places.
SMALLEST = 0.5
# The second test applies where the loss of the baseline fell by this many spreads.
LEARNED = 4.0
# The third test: a row that misses the baseline's loss in every round by this many times the loss
# and its spread is wrong, however it scatters and however little was learned.
FAR = 10.0


def judge(baseline: ComparisonRow, row: ComparisonRow) -> str | None:
    """Describe how the losses diverge; None where no divergence was shown, or none can be."""
    pairs = _paired(baseline, row)
    if pairs is None:
        return None
    row_losses, baseline_losses, steps = pairs
    if not losses_diverge(row_losses, baseline_losses):
        return None
    return (
        f"losses part from the baseline's: {at_end(row_losses).mean():.3g} in {steps} where "
        f"{baseline.name} has {at_end(baseline_losses).mean():.3g} "
        f"(seeds spread by {spread(baseline_losses):.2g})"
    )


def losses_diverge(row: np.ndarray, baseline: np.ndarray) -> bool:
    """Return whether the losses of a row diverge from the baseline's.

    Args:
        row: losses of shape (rounds, windows), two rounds or more.
        baseline: the same of the baseline; a round has one seed in both.
    """
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
    """Return the standard deviation over the seeds at all windows but the first.

    The windows are joined by the quadratic mean.
    """
    later = losses[:, 1:]
    return float(np.sqrt(later.var(axis=0, ddof=1).mean())) if later.size else 0.0


def at_end(losses: np.ndarray) -> np.ndarray:
    """Average each round's loss over the last third of its windows, as a single window is noise."""
    return losses[:, -_last_third(losses.shape[1]) :].mean(axis=1)


def _last_third(num_windows: int) -> int:
    return max(1, num_windows // 3)


def _paired(
    baseline: ComparisonRow, row: ComparisonRow
) -> tuple[np.ndarray, np.ndarray, str] | None:
    """Return (losses, the baseline's, steps of the last third) of the rounds that share a seed."""
    pairs: dict[object, tuple[list[float], list[float]]] = {}
    steps = ""
    for run, baseline_run in zip(row.rounds, baseline.rounds, strict=False):
        seed, starts = _seed(run), [window.first_step for window in run.windows]
        alike = seed == _seed(baseline_run) and starts == [
            w.first_step for w in baseline_run.windows
        ]
        if seed is None or not alike or not (curve := _curve(run)) or not _curve(baseline_run):
            continue
        pairs[seed] = curve, _curve(baseline_run)
        end = starts[-1] + run.windows[-1].num_steps
        steps = f"steps {starts[-_last_third(len(starts))]} to {end}"
    if len(pairs) < 2 or len({len(curve) for curve, _ in pairs.values()}) > 1:
        return None
    losses, baseline_losses = np.array(list(pairs.values())).swapaxes(0, 1)
    return losses, baseline_losses, steps


def _seed(run: RecordedRun) -> object:
    return run.header.task.get("seed") if run.header and run.status == "ok" else None


def _curve(run: RecordedRun) -> list[float]:
    """Return a loss for each window; empty if one is missing."""
    # Records of older versions have the loss of a window's last step alone.
    values = [w.loss if w.mean_loss is None else w.mean_loss for w in run.windows]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
