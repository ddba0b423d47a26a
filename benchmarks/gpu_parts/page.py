"""The page of a GPU's day, from its rows."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts import bounds

Row = dict[str, Any]


def _number(key: str, form: str, unit: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else format(value * unit, form)

    return cell


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "samples/s": _number("samples_per_s", ",.0f"),
    "at most": _number("at_most", ",.0f"),
    "of it": _number("share", ".0%"),
    "step ms": _number("step_ms", ".2f"),
    "host ms": _number("host_ms", ".2f"),
    "device ms": _number("device_ms", ".2f"),
    "peak GiB": _number("peak_bytes", ".2f", 2**-30),
    "with warm-up": _number("warmup_peak_bytes", ".2f", 2**-30),
    "compile s": _number("compile_s", ".1f"),
    "first step s": _number("first_step_s", ".1f"),
    "TFLOP/s": _number("tflop_per_s", ".0f"),
    "last loss": lambda row: _number("loss", ".4f")({"loss": (row.get("losses") or [None])[-1]}),
    "wall s": _number("wall_s", ".0f"),
}
_LEGEND = (
    "At most: by `accbench preflight`, for jax its own step, for all others eager PyTorch's; of "
    "it: the part reached. Host ms: the host traces or hands over a step. Device ms: the sum of "
    "its kernels, where they were profiled, which slows the step itself. Peak GiB: after the "
    "warm-up. Wall s: the item with its start."
)


def render(rows: list[Row]) -> str:
    """Return the page as Markdown: a table, then what else each item left."""
    known = bounds.read()
    gpu_name = next((row["gpu_name"] for row in rows if row.get("gpu_name")), "")
    lines = [
        f"GPU: {gpu_name or 'not known yet'}", "",
        f"| item | {' | '.join(_COLUMNS)} | |", f"| --- |{' ---: |' * len(_COLUMNS)} --- |",
    ]  # fmt: skip
    for row in rows:
        most = bounds.samples_per_s(known, gpu_name, row) if row.get("engine") else None
        share = row["samples_per_s"] / most if most and row.get("samples_per_s") else None
        full = {**row, "at_most": most, "share": share}
        cells = " | ".join(cell(full) for cell in _COLUMNS.values())
        lines.append(f"| {row['name']} | {cells} | {row.get('error') or 'ok'} |")
    lines += ["", _LEGEND, ""]
    for row in rows:
        lines += _details(row)
    return "\n".join(lines) + "\n"


def _details(row: Row) -> list[str]:
    lines: list[str] = []
    for key in ("facts", "results", "said", "page", "kernels"):
        if row.get(key):
            texts = [v if isinstance(v, str) else json.dumps(v) for v in row[key]]
            lines += [f"## {row['name']}", "", "```", *texts, "```", ""]
    if "error" in row:
        lines += [f"## {row['name']}: {row['error']}", "", "```", *row["stderr"], "```", ""]
    return lines
