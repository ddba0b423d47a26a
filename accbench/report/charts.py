"""The charts of the page, from a comparison."""

import itertools

from accbench.recording.records import EvalRecord
from accbench.report import comparison_table, svg
from accbench.report.analysis import Result
from accbench.report.comparison import Comparison, Row, counted
from accbench.report.run import Run
from accbench.report.svg import Point, Series

_NUM_COLORS = 6


def speedups(result: Result) -> str:
    """Every row but the baseline."""
    rows = [
        (f"{row.name}  {comparison_table.speedup(row)}", _color(number), row.speedup,
         *(row.speedup_ci95 or (row.speedup, row.speedup)))
        for number, row in enumerate(result.rows)
        if row.name != result.baseline and row.speedup is not None
    ]  # fmt: skip
    return svg.intervals(rows, f"speed of {result.baseline} = 1")


def throughput(comparison: Comparison) -> str:
    """Windows after the warm-up, a line a round."""
    unit, units_per_sample = counted(comparison)
    series = [
        Series(row.name, _color(number), throughput_points(run, units_per_sample), "faint")
        for number, row in enumerate(comparison.rows)
        for run in row.good
    ]
    return svg.lines(series, "steps", f"{unit}/s")


def throughput_points(run: Run, units_per_sample: int) -> tuple[Point, ...]:
    """(step, units a second) of a run's steady windows; the step is the window's last."""
    return tuple(
        (w.first_step + w.num_steps, w.num_samples * units_per_sample / w.wall_s)
        for w in run.steady
        if w.wall_s > 0
    )


def breakdown(comparison: Comparison) -> str:
    """Milliseconds a step."""
    rows = []
    for number, row in enumerate(comparison.rows):
        parts = breakdown_ms(row)
        if parts is not None:
            rows.append((row.name, _color(number), parts))
    return svg.bars(rows, ("data wait", "host", "device wait"), "ms a step")


def breakdown_ms(row: Row) -> tuple[float, float, float] | None:
    """(data wait, host, device wait) a step in ms; medians over the rounds."""
    steps_per_s = row.median("steps_per_s")
    data, host = row.median("data_wait_share"), row.median("dispatch_share")
    if not steps_per_s or data is None or host is None:
        return None
    step_ms = 1000 / steps_per_s
    return step_ms * data, step_ms * host, step_ms * max(0.0, 1 - data - host)


def break_even(comparison: Comparison, result: Result) -> str:
    """Seconds since the start over steps, to a little behind the last crossing."""
    crossings = [row.cost.break_even_steps or 0 for row in result.rows]
    last = max(200, int(1.4 * max(crossings, default=0)))
    series, marks = [], []
    for number, row in enumerate(comparison.rows):
        line = _straight(row, last)
        if line is None:
            continue
        series.append(Series(row.name, _color(number), line))
        steps = result.rows[number].cost.break_even_steps
        if steps:
            seconds = line[0][1] + (line[1][1] - line[0][1]) * steps / last
            marks.append(((float(steps), seconds), f"{steps:,} steps"))
    return svg.lines(series, "steps", "seconds", marks=marks)


def _straight(row: Row, last: int) -> tuple[Point, Point] | None:
    end = row.rounds[0].end if row.rounds else None
    steps_per_s = row.median("steps_per_s")
    if end is None or end.time_to_first_step_s is None or not steps_per_s:
        return None
    start_s = end.time_to_first_step_s
    return (0.0, start_s), (float(last), start_s + last / steps_per_s)


def losses(comparison: Comparison) -> tuple[str, str]:
    """(explanation, charts): losses on top of each other, and their difference."""
    reference = loss_points(comparison.reference)
    passes = [
        (number, row, loss_points(row.numerics)) for number, row in enumerate(comparison.rows)
    ]
    text = "The numerics pass's free run: the same weights and batches for all; dashed, float64."
    against = "float64"
    if not reference:
        passes = [
            (number, row, loss_points(row.good[0]) if row.good else ())
            for number, row in enumerate(comparison.rows)
        ]
        reference = next((points for _, row, points in passes if row is comparison.baseline), ())
        text = "At the end of every window of the first round."
        against = comparison.plan.baseline
    series = [Series(row.name, _color(number), points) for number, row, points in passes if points]
    if against == "float64":
        series.append(Series("float64", _NUM_COLORS - 1, reference, "dashed"))
    at = dict(reference)
    differences = [
        Series(one.label, one.color, tuple((x, y - at[x]) for x, y in one.points if x in at))
        for one in series
        if one.points != reference
    ]
    chart = svg.lines(series, "steps", "loss", height=240, from_zero=False)
    below = svg.lines(
        differences, "steps", f"loss - {against}", height=240, from_zero=False
    ) if any(one.points for one in differences) else ""  # fmt: skip
    if not below:
        return text, chart
    return text, f'<div class="pair"><div>{chart}</div><div>{below}</div></div>'


def loss_points(run: Run) -> tuple[Point, ...]:
    """(step, loss) of a numerics pass, or of a run's windows."""
    if run.numerics:
        phases = ("free", "reference")  # of an engine, and of float64
        of_phase = [r for r in run.numerics if r.phase in phases and r.loss is not None]
        return tuple((float(r.step), r.loss) for r in of_phase if r.loss is not None)
    return tuple(
        (float(w.first_step + w.num_steps), w.loss) for w in run.windows if w.loss is not None
    )


def evaluated(comparison: Comparison) -> bool:
    """Whether any run was evaluated."""
    return any(run.evaluations for row in comparison.rows for run in row.rounds)


def accuracy(comparison: Comparison) -> tuple[str, str]:
    """(what it shows, chart): top-1 in per cent over epochs, or else the loss; a line a round."""
    found = [e for row in comparison.rows for run in row.rounds for e in run.evaluations]
    of_loss = all(e.top1 is None for e in found)
    series = [
        Series(name, _color(number), points)
        for number, (averaged, row) in enumerate(itertools.product((False, True), comparison.rows))
        for name in [f"{row.name}, averaged weights" if averaged else row.name]
        for run in row.rounds
        if (
            points := tuple(
                point
                for e in run.evaluations
                if e.averaged == averaged and (point := _score(e, of_loss)) is not None
            )
        )
    ]
    what = "loss" if of_loss else "top-1 in per cent"
    return what, svg.lines(series, "epochs", what, height=240, from_zero=False)


def _score(record: EvalRecord, of_loss: bool) -> Point | None:
    value = record.loss if of_loss else record.top1
    if value is None:
        return None
    return float(record.epoch + 1), value if of_loss else 100 * value


def memory(result: Result) -> str:
    """MiB a row."""
    rows = [
        (row.name, _color(number), (row.peak_memory_bytes / 2**20,))
        for number, row in enumerate(result.rows)
        if row.peak_memory_bytes
    ]
    return svg.bars(rows, ("peak",), "MiB")


def input_cost(result: Result) -> str:
    """Speed with real and with synthetic data."""
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
