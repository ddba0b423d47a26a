"""The charts of a comparison's page."""

import itertools

from accbench.recording.records import EvalRecord
from accbench.report import comparison_table, svg
from accbench.report.analysis import ComparisonResult
from accbench.report.comparison import Comparison, ComparisonRow, counted
from accbench.report.run import RecordedRun
from accbench.report.svg import Point, Series

_NUM_COLORS = 6


def speedups(result: ComparisonResult) -> str:
    """Chart the speedup of every row but the baseline."""
    rows = [
        (f"{row.name}  {comparison_table.speedup(row)}", _color(number), row.speedup,
         *(row.speedup_ci95 or (row.speedup, row.speedup)))
        for number, row in enumerate(result.rows)
        if row.name != result.baseline and row.speedup is not None
    ]  # fmt: skip
    return svg.intervals(rows, f"speed of {result.baseline} = 1")


def throughput(comparison: Comparison) -> str:
    """Chart the speed of the windows after the warm-up, one line a round."""
    unit, units_per_sample = counted(comparison)
    series = [
        Series(row.name, _color(number), throughput_points(run, units_per_sample), "faint")
        for number, row in enumerate(comparison.rows)
        for run in row.good
    ]
    return svg.lines(series, "steps", f"{unit}/s")


def throughput_points(run: RecordedRun, units_per_sample: int) -> tuple[Point, ...]:
    """Return (step, units a second) of a run's steady windows.

    The step is the window's last.
    """
    return tuple(
        (w.first_step + w.num_steps, w.num_samples * units_per_sample / w.wall_s)
        for w in run.steady
        if w.wall_s > 0
    )


def breakdown(comparison: Comparison) -> str:
    """Chart how the milliseconds of a step are spent."""
    rows = []
    for number, row in enumerate(comparison.rows):
        parts = breakdown_ms(row)
        if parts is not None:
            rows.append((row.name, _color(number), parts))
    return svg.bars(rows, ("data wait", "host", "device wait"), "ms a step")


def breakdown_ms(row: ComparisonRow) -> tuple[float, float, float] | None:
    """Return (data wait, host, device wait) a step in ms; medians over the rounds."""
    steps_per_s = row.median("steps_per_s")
    data, host = row.median("data_wait_share"), row.median("dispatch_share")
    if not steps_per_s or data is None or host is None:
        return None
    step_ms = 1000 / steps_per_s
    return step_ms * data, step_ms * host, step_ms * max(0.0, 1 - data - host)


def break_even(comparison: Comparison, result: ComparisonResult) -> str:
    """Chart seconds since the start over steps, to a little behind the last crossing."""
    crossings = [row.cost.break_even_steps or 0 for row in result.rows]
    last = max(200, int(1.4 * max(crossings, default=0)))
    series, marks = [], []
    for number, row in enumerate(comparison.rows):
        line = _elapsed_line(row, last)
        if line is None:
            continue
        series.append(Series(row.name, _color(number), line))
        steps = result.rows[number].cost.break_even_steps
        if steps:
            seconds = line[0][1] + (line[1][1] - line[0][1]) * steps / last
            marks.append(((float(steps), seconds), f"{steps:,} steps"))
    return svg.lines(series, "steps", "seconds", marks=marks)


def _elapsed_line(row: ComparisonRow, last: int) -> tuple[Point, Point] | None:
    end = row.rounds[0].end if row.rounds else None
    steps_per_s = row.median("steps_per_s")
    if end is None or end.time_to_first_step_s is None or not steps_per_s:
        return None
    start_s = end.time_to_first_step_s
    return (0.0, start_s), (float(last), start_s + last / steps_per_s)


def losses(comparison: Comparison) -> tuple[str, str]:
    """Return (explanation, charts): the loss curves together, and their differences."""
    reference = loss_points(comparison.reference)
    passes = [
        (number, row, loss_points(row.numerics))
        for number, row in enumerate(comparison.rows)
        # Without dropout losses are others than the reference's.
        if all(record.phase != "without dropout" for record in row.numerics.numerics)
    ]
    text = "The numerics pass's free run: the same weights and batches for all; dashed, float64."
    reference_name = "float64"
    if not reference:
        passes = [
            (number, row, loss_points(row.good[0]) if row.good else ())
            for number, row in enumerate(comparison.rows)
        ]
        reference = next((points for _, row, points in passes if row is comparison.baseline), ())
        text = "At the end of every window of the first round."
        reference_name = comparison.plan.baseline
    series = [Series(row.name, _color(number), points) for number, row, points in passes if points]
    if reference_name == "float64":
        series.append(Series("float64", _NUM_COLORS - 1, reference, "dashed"))
    reference_loss_at = dict(reference)
    differences = [
        Series(
            line.label,
            line.color,
            tuple((x, y - reference_loss_at[x]) for x, y in line.points if x in reference_loss_at),
        )
        for line in series
        if line.points != reference
    ]
    chart = svg.lines(series, "steps", "loss", height=240, from_zero=False)
    difference_chart = svg.lines(
        differences, "steps", f"loss - {reference_name}", height=240, from_zero=False
    ) if any(line.points for line in differences) else ""  # fmt: skip
    if not difference_chart:
        return text, chart
    return text, f'<div class="pair"><div>{chart}</div><div>{difference_chart}</div></div>'


def loss_points(run: RecordedRun) -> tuple[Point, ...]:
    """Return (step, loss) of a numerics pass, or of a run's windows."""
    if run.numerics:
        phases = ("free", "reference")  # of an engine, and of float64
        phase_records = [r for r in run.numerics if r.phase in phases and r.loss is not None]
        return tuple((float(r.step), r.loss) for r in phase_records if r.loss is not None)
    return tuple(
        (float(w.first_step + w.num_steps), w.loss) for w in run.windows if w.loss is not None
    )


def has_evaluations(comparison: Comparison) -> bool:
    """Return whether any run was evaluated."""
    return any(run.evaluations for row in comparison.rows for run in row.rounds)


def accuracy(comparison: Comparison) -> tuple[str, str]:
    """Return (what it shows, chart): top-1 in per cent over epochs, or else the loss.

    There is one line a round.
    """
    evaluations = [e for row in comparison.rows for run in row.rounds for e in run.evaluations]
    uses_loss = all(e.top1 is None for e in evaluations)
    series = [
        Series(name, _color(number), points)
        for number, (averaged, row) in enumerate(itertools.product((False, True), comparison.rows))
        for name in [f"{row.name}, averaged weights" if averaged else row.name]
        for run in row.rounds
        if (
            points := tuple(
                point
                for e in run.evaluations
                if e.averaged == averaged and (point := _score(e, uses_loss)) is not None
            )
        )
    ]
    metric = "loss" if uses_loss else "top-1 in per cent"
    return metric, svg.lines(series, "epochs", metric, height=240, from_zero=False)


def _score(record: EvalRecord, uses_loss: bool) -> Point | None:
    value = record.loss if uses_loss else record.top1
    if value is None:
        return None
    return float(record.epoch + 1), value if uses_loss else 100 * value


def memory(result: ComparisonResult) -> str:
    """Chart each row's peak memory in MiB."""
    rows = [
        (row.name, _color(number), (row.peak_memory_bytes / 2**20,))
        for number, row in enumerate(result.rows)
        if row.peak_memory_bytes
    ]
    return svg.bars(rows, ("peak",), "MiB")


def input_cost(result: ComparisonResult) -> str:
    """Chart the speed with real and with synthetic data."""
    unit, units_per_sample = result.counted
    rows = [
        (f"{row.name}, {kind}", _color(number), (speed * units_per_sample,))
        for number, row in enumerate(result.rows)
        for kind, speed in (
            ("as measured", row.samples_per_s),
            ("synthetic data", row.synthetic_samples_per_s),
        )
        if speed and row.synthetic_samples_per_s
    ]
    return svg.bars(rows, ("speed",), f"{unit}/s")


def _color(number: int) -> int:
    return number % _NUM_COLORS
