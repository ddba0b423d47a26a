"""The page's charts as matplotlib figures, for notebooks; matplotlib is the extra `notebook`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.report import analysis, charts, comparison, publish
from accbench.report import run as runs
from accbench.report.comparison import Comparison


def figures_from_paths(paths: Sequence[str | Path]) -> list[Any]:
    """Return the figures of one comparison's folder, or of several runs' folders.

    Raises:
        RequestError: there are no records, or the runs cannot be compared.
    """
    folders = [Path(path) for path in paths]
    if len(folders) == 1 and (folders[0] / comparison.PLAN_FILE).exists():
        return comparison_figures(comparison.read(folders[0]))
    run_list = [runs.read(folder) for folder in folders]
    comparison.check_mixed(run_list, allow_mixed=False)
    return comparison_figures(publish.comparison_from_runs(run_list))


def comparison_figures(measured: Comparison) -> list[Any]:
    """Return two figures of a comparison.

    The first shows the speed with its spread, and the throughput over steps; the second how a
    step's time is spent, and the loss over steps.
    """
    from matplotlib.figure import Figure

    result = analysis.judge(measured)
    unit, units_per_sample = result.counted
    speed = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = speed.subplots(1, 2)
    names = [result_row.name for result_row in result.rows]
    for number, result_row in enumerate(result.rows):
        rounds = [
            value * units_per_sample
            for value in result_row.samples_per_s_rounds
            if value is not None
        ]
        left.barh(
            number,
            (result_row.samples_per_s or 0) * units_per_sample,
            color=f"C{number}",
            alpha=0.6,
        )
        left.plot(rounds, [number] * len(rounds), "|", color="black", markersize=12)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel(f"{unit}/s, a stroke for each round")
    for number, row in enumerate(measured.rows):
        for run in row.good:
            points = charts.throughput_points(run, units_per_sample)
            label = row.name if run is row.good[0] else None
            right.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.7, label=label)
    right.set_ylim(bottom=0)
    right.set_xlabel("steps")
    right.set_ylabel(f"{unit}/s")
    right.legend(frameon=False)
    return [speed, _step_and_loss(measured)]


def _step_and_loss(measured: Comparison) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [(row.name, parts) for row in measured.rows if (parts := charts.breakdown_ms(row))]
    start = [0.0] * len(shown)
    for index, part in enumerate(("data wait", "host", "device wait")):
        widths = [parts[index] for _, parts in shown]
        left.barh([name for name, _ in shown], widths, left=start, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("ms a step")
    left.legend(frameon=False)
    for number, row in enumerate(measured.rows):
        run = row.numerics if row.numerics.numerics else (row.good[0] if row.good else None)
        points = charts.loss_points(run) if run is not None else ()
        if points:
            right.plot(*zip(*points, strict=True), color=f"C{number}", label=row.name)
    right.set_xlabel("steps")
    right.set_ylabel("loss")
    right.legend(frameon=False)
    return figure
