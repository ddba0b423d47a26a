"""Runs and comparisons as text in each format, and as files."""

import json
from collections.abc import Sequence
from pathlib import Path

from accbench.errors import RequestError
from accbench.report import analysis, comparison, comparison_table, html, summary, table
from accbench.report import run as runs
from accbench.report.comparison import Comparison, Plan, Row, RowPlan


def report(paths: Sequence[Path], format: str, allow_mixed: bool = False) -> tuple[str, list[str]]:
    """What `accbench report` prints, and a line for each path that it cannot show.

    Raises:
        RequestError: runs of different settings side by side, and that was not asked for;
            or runs and comparisons in one JSON document.
    """
    found, rows, files, problems = [], [], [], []
    for path in paths:
        try:
            if (path / comparison.PLAN_FILE).exists():
                found.append(comparison.read(path, allow_mixed))
            else:
                rows.append(summary.of_run(path))
                files.append(path)
        except RequestError as error:
            problems.append(str(error))
    beside = [runs.read(path) for path in files]
    mixed = comparison.check_mixed(beside, allow_mixed)
    if rows and format == "html":
        found.append(of_runs(beside, mixed))
    if found and rows and format == "json":
        raise RequestError("runs and comparisons in one JSON document: report them apart")
    texts = [render(found, format)] if found else []
    if rows and format != "html":
        texts.insert(0, table.render(rows, format, mixed))
    return "\n".join(texts), problems


def of_runs(found: Sequence[runs.Run], mixed: tuple[str, ...] = ()) -> Comparison:
    """Single runs as a comparison of one round, of which no verdict is asked."""
    names: list[str] = []
    for run in found:
        times = sum(1 for name in names if name.split("#")[0] == run.name)
        names.append(f"{run.name}#{times + 1}" if times else run.name)
    plan = Plan(
        rows=tuple(RowPlan(name, name, {}) for name in names),
        baseline=names[0], repeats=1, min_effect=0.0, numerics_steps=0, input_round=False,
    )  # fmt: skip
    rows = tuple(Row(name, (run,)) for name, run in zip(names, found, strict=True))
    return Comparison(", ".join(names), plan, rows, mixed=mixed)


def render(found: Sequence[Comparison], format: str) -> str:
    """One comparison after another as table, md, html or json, ending in a newline."""
    if format == "html":
        return html.page(found)
    results = [analysis.judge(one) for one in found]
    if format == "json":
        values = [analysis.as_json(result) for result in results]
        return json.dumps(values[0] if len(values) == 1 else values, indent=1) + "\n"
    if format == "md":
        return "\n".join(comparison_table.as_markdown(result) for result in results)
    return "\n".join(comparison_table.terminal(result) for result in results)


def write(found: Comparison, folder: Path) -> list[Path]:
    """report.html, report.md and report.json in `folder`."""
    paths = []
    for format in ("html", "md", "json"):
        path = folder / f"report.{format}"
        path.write_text(render([found], format), encoding="utf-8")
        paths.append(path)
    return paths
