"""Runs and comparisons as text in each format, and as files."""

import json
from collections.abc import Sequence
from pathlib import Path

from accbench.errors import RequestError
from accbench.report import analysis, comparison, comparison_table, html, summary, table
from accbench.report import run as runs
from accbench.report.comparison import Comparison, ComparisonPlan, ComparisonRow, RowPlan


def report(paths: Sequence[Path], format: str, allow_mixed: bool = False) -> tuple[str, list[str]]:
    """Render what `accbench report` prints, and a line for each path that it cannot show.

    Raises:
        RequestError: the runs have different settings and `allow_mixed` is off, or one JSON
            document would hold both runs and comparisons.
    """
    comparisons, rows, files, problems = [], [], [], []
    for path in paths:
        try:
            if (path / comparison.PLAN_FILE).exists():
                comparisons.append(comparison.read(path, allow_mixed))
            else:
                rows.append(summary.summarize_run(path))
                files.append(path)
        except RequestError as error:
            problems.append(str(error))
    runs_read = [runs.read(path) for path in files]
    mixed = comparison.check_mixed(runs_read, allow_mixed)
    if rows and format == "html":
        comparisons.append(comparison_from_runs(runs_read, mixed))
    if comparisons and rows and format == "json":
        raise RequestError(
            "one JSON document cannot hold both runs and comparisons; report them separately"
        )
    texts = [render(comparisons, format)] if comparisons else []
    if rows and format != "html":
        texts.insert(0, table.render(rows, format, mixed))
    return "\n".join(texts), problems


def comparison_from_runs(
    run_list: Sequence[runs.RecordedRun], mixed: tuple[str, ...] = ()
) -> Comparison:
    """Wrap single runs in a comparison of one round, from which no verdict is asked."""
    names: list[str] = []
    for run in run_list:
        num_same_name = sum(1 for name in names if name.split("#")[0] == run.name)
        names.append(f"{run.name}#{num_same_name + 1}" if num_same_name else run.name)
    plan = ComparisonPlan(
        rows=tuple(RowPlan(name, name, {}) for name in names),
        baseline=names[0], repeats=1, min_effect=0.0, numerics_steps=0, input_round=False,
    )  # fmt: skip
    rows = tuple(ComparisonRow(name, (run,)) for name, run in zip(names, run_list, strict=True))
    return Comparison(", ".join(names), plan, rows, mixed=mixed)


def render(comparisons: Sequence[Comparison], format: str) -> str:
    """Render comparisons one after another as table, md, html or json, ending in a newline."""
    if format == "html":
        return html.page(comparisons)
    results = [analysis.judge(item) for item in comparisons]
    if format == "json":
        values = [analysis.as_json(result) for result in results]
        return json.dumps(values[0] if len(values) == 1 else values, indent=1) + "\n"
    if format == "md":
        return "\n".join(comparison_table.as_markdown(result) for result in results)
    return "\n".join(comparison_table.terminal(result) for result in results)


def write(measured: Comparison, folder: Path) -> list[Path]:
    """Write report.html, report.md and report.json into `folder`, and return their paths."""
    paths = []
    for format in ("html", "md", "json"):
        path = folder / f"report.{format}"
        path.write_text(render([measured], format), encoding="utf-8")
        paths.append(path)
    return paths
