"""A comparison's numbers and verdicts: what every report shows, in one plain form."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from accbench.report import comparison as comparisons
from accbench.report import cost, numerics, sequential, statistics, verdict
from accbench.report.comparison import Comparison, ComparisonPlan, ComparisonRow
from accbench.report.cost import Cost
from accbench.report.numerics import Numerics
from accbench.report.run import RecordedRun

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class DisturbedRound:
    """A round of a row in which something else used the machine."""

    number: int
    """From 1."""
    reason: str


@dataclasses.dataclass(frozen=True)
class RowResult:
    """The figures and the verdict of one row. None: not known."""

    name: str
    engine: str | None
    compiler: str | None
    verdict: str
    """baseline, faster, slower, no difference shown, not valid or failed."""
    reasons: tuple[str, ...]
    """Why the row is not valid, or why it failed."""
    rounds_ok: int
    samples_per_s: float | None
    """The median over the rounds."""
    samples_per_s_rounds: tuple[float | None, ...]
    speedup: float | None
    """Geometric mean of the ratios to the baseline, round by round."""
    speedup_ci95: tuple[float, float] | None
    """None with a single round."""
    speedup_over_best: float | None
    """The same over the fastest row that is not compiled by XLA."""
    speedup_over_best_ci95: tuple[float, float] | None
    data_wait_share: float | None
    dispatch_share: float | None
    peak_memory_bytes: int | None
    num_graphs: float | None
    synthetic_samples_per_s: float | None
    input_share: float | None
    """Share of the time that synthetic data saves, 0..1."""
    cost: Cost
    numerics: Numerics
    speedup_of_means: float | None = None
    """The same mean of ratios of whole runs, where `speedup` is of their median windows."""
    decided_after: int | None = None
    """Rounds after which a look decided the row; None: it was not, or nobody looked."""
    repeated_rounds: tuple[DisturbedRound, ...] = ()
    """Rounds that were measured again."""
    disturbed_rounds: tuple[DisturbedRound, ...] = ()
    """Rounds that stand although they were disturbed."""


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
    """A judged comparison."""

    name: str
    headline: str
    setting: dict[str, Any]
    baseline: str
    best: str | None
    """The fastest row that is not compiled by XLA."""
    min_effect: float
    repeats: int
    max_repeats: int
    """Rounds of a row whose interval stays too wide for a verdict."""
    max_minutes: float | None
    """Minutes after which no round begins; None: no limit."""
    price_per_hour: float | None
    order_seed: int | None
    """Seed of the rows' order within the rounds."""
    mixed: tuple[str, ...]
    rows: tuple[RowResult, ...]
    quick: bool = False
    """Whether it is a first verdict, of few steps in little time."""
    usual_scatter: float | None = None
    """Standard deviation of the logarithm of a round's ratio that intervals of undisturbed rounds
    lean on, and of disturbed ones where that is wider; None: they follow from the rounds alone."""
    alternates_windows: bool = False
    """Whether the runs of a round trained their windows in turn, which are compared in pairs."""
    num_runs_alone: int = 0
    """Runs among them that had no other in between: memory was short, or others had ended."""
    takes_medians: bool = False
    """Whether a run is judged by the median of its windows, or by its mean."""
    counted: tuple[str, int] = ("samples", 1)
    """The unit that tables and charts tell speeds in, and units a sample."""
    schema_version: int = SCHEMA_VERSION


def judge(comparison: Comparison) -> ComparisonResult:
    """Compute all that reports show."""
    best = _best(comparison)
    rows = tuple(_row_result(comparison, row, best) for row in comparison.rows)
    header = next((run.header for row in comparison.rows for run in row.rounds if run.header), None)
    setting: dict[str, Any] = {}
    if header is not None:
        setting = next(run.setting() for row in comparison.rows for run in row.rounds if run.header)
    plan = comparison.plan
    result = ComparisonResult(
        name=comparison.name, headline="", setting=setting, baseline=plan.baseline,
        best=best.name if best else None, min_effect=plan.min_effect, repeats=plan.repeats,
        max_repeats=plan.most_rounds, max_minutes=plan.max_minutes,
        price_per_hour=plan.price_per_hour, order_seed=plan.order_seed,
        quick=plan.quick, usual_scatter=plan.usual_scatter,
        alternates_windows=plan.alternates_windows, num_runs_alone=_num_runs_alone(comparison),
        takes_medians=plan.takes_medians,
        mixed=comparison.mixed, rows=rows, counted=comparisons.counted(comparison),
    )  # fmt: skip
    return dataclasses.replace(result, headline=headline(result))


def _num_runs_alone(comparison: Comparison) -> int:
    if not comparison.plan.alternates_windows:
        return 0
    return sum(_num_alone(row) for row in comparison.rows)


def _num_alone(row: ComparisonRow) -> int:
    """Count a row's runs that had no other in between, of a plan whose windows take turns."""
    return sum(not run.end.waited_s for run in row.good if run.end)


def _ran_alone(row: ComparisonRow) -> bool:
    return _num_alone(row) > 0


def _best(comparison: Comparison) -> ComparisonRow | None:
    def compiler(row: ComparisonRow) -> str | None:
        return next((run.header.compiler for run in row.good if run.header), None)

    # Not by samples/s: rows may have run in different rounds, on a machine whose speed changes.
    speeds = {
        row.name: _speedup(comparison.plan, row, comparison.baseline)[0] or 0.0
        for row in comparison.rows
        if row.good and compiler(row) != "xla"
    }
    if not speeds:
        return None
    fastest = max(speeds, key=lambda name: speeds[name])
    return next(row for row in comparison.rows if row.name == fastest)


def _row_result(
    comparison: Comparison, row: ComparisonRow, best: ComparisonRow | None
) -> RowResult:
    baseline = comparison.baseline
    plan = comparison.plan
    speedup, interval = _speedup(plan, row, baseline)
    best_speedup, best_interval = (
        _speedup(plan, row, best) if best is not None and best is not row else (None, None)
    )
    checked = numerics.judge(comparison, row)
    end = comparisons.find_end(plan, row, baseline)
    verdict_word, reasons = _verdict(comparison, row, checked)
    header = next((run.header for run in row.rounds if run.header), None)
    speed, synthetic = row.median("samples_per_s"), row.synthetic.samples_per_s
    ends = [run.end for run in row.good if run.end]
    return RowResult(
        name=row.name,
        engine=header.engine if header else None,
        compiler=header.compiler if header else None,
        verdict=verdict_word, reasons=tuple(reasons), rounds_ok=len(row.good),
        samples_per_s=speed,
        samples_per_s_rounds=tuple(
            run.samples_per_s if run.status == "ok" else None for run in row.rounds
        ),
        speedup=speedup, speedup_ci95=interval,
        speedup_over_best=best_speedup, speedup_over_best_ci95=best_interval,
        data_wait_share=row.median("data_wait_share"),
        dispatch_share=row.median("dispatch_share"),
        peak_memory_bytes=max((run.peak_memory_bytes or 0 for run in row.good), default=None),
        num_graphs=ends[-1].num_graphs if ends else None,
        synthetic_samples_per_s=synthetic,
        input_share=max(0.0, 1 - speed / synthetic) if speed and synthetic else None,
        cost=cost.compute_cost(row, baseline, speedup, comparison.plan.price_per_hour),
        numerics=checked,
        speedup_of_means=_speedup_of_means(plan, row, baseline),
        decided_after=end.num_rounds if end.is_decided else None,
        repeated_rounds=_disturbed(plan, {aside.number: aside.run for aside in row.set_aside}),
        disturbed_rounds=_disturbed(plan, _numbered(row.rounds)),
    )  # fmt: skip


def _disturbed(plan: ComparisonPlan, runs: dict[int, RecordedRun]) -> tuple[DisturbedRound, ...]:
    if plan.repeat_rule is None:
        return ()
    reasons = {number: plan.repeat_rule.disturbance_of(run) for number, run in runs.items()}
    return tuple(DisturbedRound(number, why) for number, why in reasons.items() if why)


def _numbered(runs: Sequence[RecordedRun]) -> dict[int, RecordedRun]:
    return dict(enumerate(runs, start=1))


def _speedup_of_means(
    plan: ComparisonPlan, row: ComparisonRow, baseline: ComparisonRow
) -> float | None:
    of_means = dataclasses.replace(plan, takes_medians=False)
    return _speedup(of_means, row, baseline)[0] if plan.takes_medians else None


def _speedup(
    plan: ComparisonPlan, row: ComparisonRow, other: ComparisonRow
) -> tuple[float | None, tuple[float, float] | None]:
    """Return a row's speed over another's with its interval, as far as there are rounds of both."""
    ratios = _known_ratios(plan, row, other)
    if len(ratios) < 2:
        return (ratios[0] if ratios else None), None
    if plan.stops_when_decided:
        return sequential.mean_with_interval(
            ratios, plan.repeats, plan.most_rounds, plan.looks_for_far
        )
    of_rounds_alone = statistics.mean_with_interval(ratios)
    if plan.usual_scatter is None or any(map(_ran_alone, (row, other))):
        return of_rounds_alone
    leaning = statistics.mean_with_interval(ratios, usual_scatter=plan.usual_scatter)
    if any(_disturbed(plan, _numbered(each.rounds)) for each in (row, other)):
        # They may scatter more than usual, and three may lie close by chance.
        return max(leaning, of_rounds_alone, key=lambda found: found[1][1] - found[1][0])
    return leaning


def _known_ratios(plan: ComparisonPlan, row: ComparisonRow, other: ComparisonRow) -> list[float]:
    return [r for r in comparisons.round_ratios(plan, row, other) if r is not None]


def _verdict(
    comparison: Comparison, row: ComparisonRow, checked: Numerics
) -> tuple[str, list[str]]:
    if row.failure is not None:
        nan = any(run.status == "nan" for run in row.rounds)
        return (verdict.NOT_VALID if nan else verdict.FAILED), [row.failure]
    reasons = verdict.reasons_against(comparison, row, checked)
    if row is comparison.baseline:
        return (verdict.NOT_VALID if reasons else verdict.BASELINE), reasons
    speedup, interval = _speedup(comparison.plan, row, comparison.baseline)
    if speedup is None or interval is None:
        reasons.append("fewer than two rounds in which it and the baseline ended well")
        return verdict.NOT_VALID, reasons
    num_rounds = len(_known_ratios(comparison.plan, row, comparison.baseline))
    is_far_look = comparison.plan.looks_for_far and num_rounds == sequential.FAR_LOOK
    wide = verdict.too_wide(speedup, interval, comparison.plan.min_effect, is_far_look)
    if wide:
        reasons.append(wide)
    if reasons:
        return verdict.NOT_VALID, reasons
    return verdict.judge_interval(speedup, interval, comparison.plan.min_effect), []


def headline(result: ComparisonResult) -> str:
    """Join the sentences of all rows but the baseline."""
    sentences = [sentence(row, result) for row in result.rows if row.name != result.baseline]
    return " ".join(sentences)


def sentence(row: RowResult, result: ComparisonResult) -> str:
    """Phrase a row's verdict for a person."""
    if row.verdict == verdict.FAILED:
        return f"{row.name} did not run."
    if row.verdict == verdict.NOT_VALID or row.speedup is None or row.speedup_ci95 is None:
        return f"{row.name}: no valid result ({row.reasons[0]})."
    low, high = row.speedup_ci95
    interval = f"{row.speedup:.2f}x its speed, 95 % interval {low:.2f} to {high:.2f}"
    words = f"{row.name} is {row.verdict} than {result.baseline} ({interval})"
    if row.verdict == verdict.NO_DIFFERENCE:
        words = f"between {row.name} and {result.baseline} no difference was shown ({interval})"
    return f"{words}{_numerics_words(row)}{_break_even_words(row)}."


def _numerics_words(row: RowResult) -> str:
    if row.numerics.verdict == numerics.SAME:
        return ", trains the same"
    return "" if row.numerics.verdict == numerics.DIFFERS else ", numerics not checked"


def _break_even_words(row: RowResult) -> str:
    if row.verdict != verdict.FASTER or row.cost.break_even_steps is None:
        return ""
    return f", and has paid back its start after {row.cost.break_even_steps:,} steps"


def as_json(result: ComparisonResult) -> dict[str, Any]:
    """Return plain values as `comparison.schema.json` describes.

    The cost's fields lie in the row.
    """
    values = dataclasses.asdict(result)
    del values["counted"]  # its speeds are of samples, and the setting has their size
    for row in values["rows"]:
        row.update(row.pop("cost"))
    return values
