"""Comparisons as files and as text in each format."""

import json
from collections.abc import Sequence
from pathlib import Path

from accbench.report import analysis, comparison_table, html
from accbench.report.comparison import Comparison


def render(found: Sequence[Comparison], format: str) -> str:
    """One comparison after another as table, md, html or json, ending in a newline."""
    if format == "html":
        return html.page(found)
    results = [analysis.judge(one) for one in found]
    if format == "json":
        values = [analysis.as_json(result) for result in results]
        return json.dumps(values[0] if len(values) == 1 else values, indent=1) + "\n"
    if format == "md":
        return "\n".join(comparison_table.markdown(result) for result in results)
    return "\n".join(comparison_table.terminal(result) for result in results)


def write(found: Comparison, folder: Path) -> list[Path]:
    """report.html, report.md and report.json in `folder`."""
    paths = []
    for format in ("html", "md", "json"):
        path = folder / f"report.{format}"
        path.write_text(render([found], format), encoding="utf-8")
        paths.append(path)
    return paths
