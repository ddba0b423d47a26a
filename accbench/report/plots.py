"""The page's charts as matplotlib figures, for notebooks; matplotlib is the extra `notebook`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.report import analysis, charts, comparison, publish
from accbench.report import run as runs
from accbench.report.comparison import Comparison


def of_paths(paths: Sequence[str | Path]) -> list[Any]:
    """Figures of one comparison's folder, or of several runs' folders.

    Raises:
        RequestError: there are no records, or the runs do not belong side by side.
    """
    folders = [Path(path) for path in paths]
    if len(folders) == 1 and (folders[0] / comparison.PLAN_FILE).exists():
        return of_comparison(comparison.read(folders[0]))
    found = [runs.read(folder) for folder in folders]
    comparison.check_mixed(found, allow_mixed=False)
    return of_comparison(publish.of_runs(found))


def of_comparison(found: Comparison) -> list[Any]:
    """Speed with its spread and throughput over steps; time of a step; loss over steps."""
    from matplotlib.figure import Figure

    result = analysis.judge(found)
    unit, of_sample = result.counted
    speed = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = speed.subplots(1, 2)
    names = [row.name for row in result.rows]
    for number, row in enumerate(result.rows):
        rounds = [value * of_sample for value in row.samples_per_s_rounds if value is not None]
        left.barh(number, (row.samples_per_s or 0) * of_sample, color=f"C{number}", alpha=0.6)
        left.plot(rounds, [number] * len(rounds), "|", color="black", markersize=12)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel(f"{unit}/s, a stroke for each round")
    for number, one in enumerate(found.rows):
        for run in one.good:
            points = charts.throughput_points(run, of_sample)
            label = one.name if run is one.good[0] else None
            right.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.7, label=label)
    right.set_ylim(bottom=0)
    right.set_xlabel("steps")
    right.set_ylabel(f"{unit}/s")
    right.legend(frameon=False)
    return [speed, _step_and_loss(found)]


def _step_and_loss(found: Comparison) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [(row.name, parts) for row in found.rows if (parts := charts.breakdown_ms(row))]
    start = [0.0] * len(shown)
    for index, part in enumerate(("data wait", "host", "device wait")):
        widths = [parts[index] for _, parts in shown]
        left.barh([name for name, _ in shown], widths, left=start, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("ms a step")
    left.legend(frameon=False)
    for number, row in enumerate(found.rows):
        of_row = row.numerics if row.numerics.numerics else (row.good[0] if row.good else None)
        points = charts.loss_points(of_row) if of_row is not None else ()
        if points:
            right.plot(*zip(*points, strict=True), color=f"C{number}", label=row.name)
    right.set_xlabel("steps")
    right.set_ylabel("loss")
    right.legend(frameon=False)
    return figure
