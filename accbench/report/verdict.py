"""Whether a difference was shown, in words, and what makes a measurement invalid."""

import statistics

from accbench.config import makes_batches_between_steps
from accbench.report import losses, numerics
from accbench.report.comparison import Comparison, ComparisonRow
from accbench.report.numerics import Numerics
from accbench.report.sequential import FAR_LOOK, FAR_SCATTER
from accbench.report.statistics import direction, is_too_wide

# Who waits for loading processes trains as fast as they do, whatever an engine saves. Batches that
# are made between steps take each row the same time, and only that share of a difference away.
MAX_DATA_WAIT_SHARE, MAX_SHARE_BETWEEN_STEPS = 0.10, 0.25
MAX_OTHER_CPU_SHARE = 0.20
MAX_THROTTLED_SHARE = 0.10

FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference shown"
NOT_VALID, FAILED, BASELINE = "not valid", "failed", "baseline"


def judge_interval(speedup: float, interval: tuple[float, float], min_effect: float) -> str:
    """Return faster, slower or no difference shown, for a speedup and its interval."""
    return {1: FASTER, -1: SLOWER, 0: NO_DIFFERENCE}[direction(speedup, interval, min_effect)]


def too_wide(
    speedup: float, interval: tuple[float, float], min_effect: float, looks_for_far: bool
) -> str | None:
    """Return the reason why rounds leave an interval too wide for any answer; None if they do not.

    Args:
        speedup: the mean ratio of the rounds.
        interval: of the mean.
        min_effect: the smallest difference that matters.
        looks_for_far: whether the interval is that of the look after two rounds.
    """
    if not is_too_wide(speedup, interval, min_effect):
        return None
    if looks_for_far:
        return (
            f"{FAR_LOOK} rounds decide only what is far off: their interval takes for granted that "
            f"rounds scatter by {FAR_SCATTER:.0%}; go on with more rounds, or more --max_minutes"
        )
    width = (interval[1] - interval[0]) / speedup
    return (
        f"spread between repeats too wide: the interval spans {width:.0%} of the speedup; "
        "more --repeats, more --max_steps or a quieter machine"
    )


def reasons_against(comparison: Comparison, row: ComparisonRow, checked: Numerics) -> list[str]:
    """Return why the row's speed, or its ratio to the baseline's, is not valid; empty if it is."""
    reasons = _compiler_reasons(row)
    reasons += _numerics_reasons(checked)
    if row is not comparison.baseline:
        # A speedup over a baseline that trains something else means nothing.
        baseline_numerics = numerics.judge(comparison, comparison.baseline)
        baseline_reasons = (
            _numerics_reasons(baseline_numerics)
            if baseline_numerics.reason != checked.reason
            else []
        )
        reasons += [f"{comparison.baseline.name}: {reason}" for reason in baseline_reasons]
    if row is not comparison.baseline and (divergence := losses.judge(comparison.baseline, row)):
        reasons.append(f"{row.name}: {divergence}")
    names = dict.fromkeys((row.name, comparison.baseline.name))
    both = [each for name in names for each in comparison.rows if each.name == name]
    for measured in both:
        reasons += _loss_reasons(measured) + _round_reasons(measured)
    for measured in both:
        reasons += _input_reasons(measured) + _device_reasons(measured)
    if comparison.mixed:
        reasons.append(f"runs of different settings: {'; '.join(comparison.mixed)}")
    return reasons


def _numerics_reasons(checked: Numerics) -> list[str]:
    if checked.verdict == numerics.DIFFERS:
        return [f"different numerics: {checked.reason}"]
    return [f"numerics not checked: {checked.reason}"] if checked.crashed else []


def _compiler_reasons(row: ComparisonRow) -> list[str]:
    reasons = []
    ends = [run.end for run in row.good if run.end is not None]
    recompiles = max((end.num_recompiles or 0 for end in ends), default=0)
    fallbacks = max((end.num_fallbacks or 0 for end in ends), default=0)
    compiler = next((run.header.compiler for run in row.good if run.header), None)
    if recompiles:
        changes = next((end.shape_changes for end in ends if end.shape_changes), [])
        reasons.append(
            _with_details(
                f"{row.name} compiled {recompiles} graphs again after the warm-up", changes
            )
        )
    if fallbacks:
        left = next((end.left_compiler for end in ends if end.left_compiler), [])
        reasons.append(_with_details(f"{row.name}: {fallbacks} operations left the compiler", left))
    if compiler and any(end.num_graphs == 0 for end in ends):
        reasons.append(f"{row.name} compiled nothing: no compiled graph ran in a step")
    return reasons


def _with_details(reason: str, details: list[str]) -> str:
    more = f", and {len(details) - 1} more" if len(details) > 1 else ""
    return f"{reason}: {details[0]}{more}" if details else reason


def _loss_reasons(row: ComparisonRow) -> list[str]:
    if any(run.status == "nan" or any(w.loss is None for w in run.windows) for run in row.rounds):
        return [f"{row.name}: the loss became NaN or infinite"]
    return []


def _round_reasons(row: ComparisonRow) -> list[str]:
    """Return the reason why a failed or missing round makes the row not valid.

    A failed round is not a slow round that may be left out: the others would be a selection.
    """
    missing = {n: run for n, run in enumerate(row.rounds, start=1) if run.status != "ok"}
    failed = {n: run for n, run in missing.items() if run.status not in ("nan", "not run")}
    if failed:
        number, run = next(iter(failed.items()))
        why = run.end.error if run.end and run.end.error else "it was killed"
        return [f"round {number} of {row.name} failed ({run.status}): {why}"]
    if missing and all(run.status == "not run" for run in missing.values()):
        return [f"{len(missing)} of {len(row.rounds)} rounds of {row.name} have not run"]
    return []


def _input_reasons(row: ComparisonRow) -> list[str]:
    share = row.median("data_wait_share")
    task = next((run.header.task for run in row.good if run.header), {})
    between_steps = makes_batches_between_steps(task.get("device"), task.get("workers"))
    limit = MAX_SHARE_BETWEEN_STEPS if between_steps else MAX_DATA_WAIT_SHARE
    if share is not None and share > limit:
        return [f"loader-bound: {row.name} waited for data {share:.0%} of the time"]
    return []


def _device_reasons(row: ComparisonRow) -> list[str]:
    devices = [run.device for run in row.good if run.device is not None]

    def values_of(name: str) -> list[float]:
        values = [getattr(device, name) for device in devices]
        return [value for value in values if value is not None] or [0.0]

    reasons = []
    throttled, processes = (
        max(values_of("throttled_share")),
        max(values_of("other_device_processes")),
    )
    # The median of the rounds: it is what one disturbed round does to the speed, too.
    shares = [run.other_cpu_share for run in row.good]
    shared = statistics.median([share for share in shares if share is not None] or [0.0])
    if throttled > MAX_THROTTLED_SHARE:
        reasons.append(f"the device was throttled: {row.name}, {throttled:.0%} of the time")
    if shared > MAX_OTHER_CPU_SHARE:
        reasons.append(f"the machine was shared: others took {shared:.0%} of it in {row.name}")
    if processes > 0:
        reasons.append(f"the device was shared: other processes were on it in {row.name}")
    return reasons
