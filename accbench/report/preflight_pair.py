"""Two preflights side by side: every figure of both, and its change."""

from typing import Any

from accbench.report.preflight_page import (
    Document,
    Headline,
    PreflightResult,
    Section,
    Table,
    number,
)
from accbench.report.preflight_sections import (
    GIB,
    LARGE,
    NOT_COUNTED,
    PERCENT,
    bound_with_launches_s,
    bytes_by_kind,
    describe_setting,
    fit_headline,
    warning_lines,
)  # fmt: skip

Change = dict[str, float | None]
"""a, b and change_percent, which is None where one is not known or a is 0."""


def _figures(result: PreflightResult) -> dict[str, tuple[str, float, float | None]]:
    """Return the figures of a result: key -> (title, the title's unit, value)."""
    step, memory = result["step"], result["memory"]
    reduction, eager = result["reduction"] or {}, result["eager"] or {}
    search, speed = result.get("batch_search") or {}, step["samples_per_s_at_most"]
    of_all = None if speed is None else speed * result["num_gpus"]
    slower_s, early = (
        bound_with_launches_s(result, step),
        reduction.get("started_before_last_product"),
    )
    return {
        "bytes": ("GB", 1e9, step["bytes"]),
        "flops": ("TFLOP", 1e12, step["flops"]),
        "launches": ("launches", 1, step["launches"]),
        "small_launches": ("kernels that move less than 1 MB", 1, step["small_launches"]),
        "peak_bytes": ("GiB a GPU at its peak, at least", GIB, memory["peak_bytes"]),
        "rematerialised": ("instructions computed twice", 1, memory["rematerialised"]),
        "bound_s": ("ms a step, at least", 1e-3, step["bound_s"]),
        "bound_with_launches_s": ("ms a step, with a guess at launches", 1e-3, slower_s),
        "samples_per_s_at_most": ("samples/s a GPU, at most", 1, speed),
        "samples_per_s_of_all_at_most": ("samples/s of all GPUs, at most", 1, of_all),
        "eager_bound_s": ("eager PyTorch: ms a step, at least", 1e-3, eager.get("bound_s")),
        "host_transfers": ("transfers to or from the host", 1, len(result["host_transfers"])),
        "all_reduces": (
            "collectives without all-gathers", 1, len(reduction.get("all_reduces", ()))),
        "started_before_last_product": (
            "% of their bytes started before the last product", PERCENT, early),
        "largest_batch": ("largest batch that fits, of those tried", 1, search.get("largest")),
        "compile_s": ("seconds to compile", 1, result["cost"].get("compile_s")),
    }  # fmt: skip


def as_json(a: PreflightResult, b: PreflightResult) -> dict[str, Any]:
    """Return both settings, and the change of every figure, as plain values."""
    figures_a, figures_b = _figures(a), _figures(b)
    return {
        "kind": "preflight comparison",
        "schema_version": 1,
        "a": describe_setting(a),
        "b": describe_setting(b),
        "differ": _differences(a, b),
        "figures": {key: _change(figures_a[key][2], figures_b[key][2]) for key in figures_a},
        "kinds": _changes_by_group(a, b, "kinds", "kind", ("launches", "bytes")),
        "large_tensors": _changes_by_group(
            a, b, "large_tensors", "element_type", ("count", "bytes")
        ),
    }


def _change(a: float | None, b: float | None) -> Change:
    percent = 100 * (b - a) / a if a and b is not None else None
    return {"a": a, "b": b, "change_percent": percent}


def _changes_by_group(
    a: PreflightResult, b: PreflightResult, part: str, name: str, keys: tuple[str, ...]
) -> dict[str, dict[str, Change]]:
    """Return the change of each row of a list by its name; a missing row counts as 0."""
    rows_a, rows_b = ({row[name]: row for row in result[part]} for result in (a, b))
    changes = {}
    for group in {**rows_a, **rows_b}:
        row_a, row_b = rows_a.get(group, {}), rows_b.get(group, {})
        changes[group] = {key: _change(row_a.get(key, 0), row_b.get(key, 0)) for key in keys}
    return changes


def _differences(a: PreflightResult, b: PreflightResult) -> list[str]:
    """Return what differs in the two requests, one line each."""
    requests = [
        {
            **result["task"],
            **result["versions"],
            "GPU": result["gpu"]["name"],
            "GPUs": result["num_gpus"],
        }
        for result in (a, b)
    ]
    keys = [key for key in {**requests[0], **requests[1]} if key != "nproc_per_node"]  # it is GPUs
    values = {key: [result.get(key) for result in requests] for key in keys}
    return [
        f"{key}: {value_a} and {value_b}"
        for key, (value_a, value_b) in values.items()
        if value_a != value_b
    ]


def _cells(change: Change, unit: float = 1) -> tuple[str, str, str]:
    """Return the texts of a change's cells: of a, of b, and of what has changed."""
    a, b = (
        None if value is None else value if unit == 1 else value / unit
        for value in (change["a"], change["b"])
    )
    percent = change["change_percent"]
    if a is not None and a == b:
        text = "0 points" if unit == PERCENT else "0 %"
    elif unit == PERCENT and a is not None and b is not None:
        text = f"{b - a:+,.1f} points"  # per cent of per cent would mislead
    elif percent is not None:
        text = f"{percent:+,.{1 if abs(percent) >= 1 else 2}f} %"
    else:
        text = "from 0" if a == 0 and b is not None else "-"
    return number(a), number(b), text


def build_document(a: PreflightResult, b: PreflightResult) -> Document:
    """Build the report that shows both results side by side."""
    values = as_json(a, b)
    figures = values["figures"]
    rows = [
        (title, *_cells(figures[key], unit))
        for key, (title, unit, _) in _figures(a).items()
        if (figures[key]["a"], figures[key]["b"]) != (None, None)
    ]
    lines = [
        "Speeds and times are bounds and not predictions.",
        NOT_COUNTED,
        *(f"A and B differ in {line}" for line in values["differ"]),
    ]
    results = (("A", a), ("B", b))
    return Document(
        name=" and ".join(dict.fromkeys(str(result["task"]["model"]) for result in (a, b))),
        headlines=[
            *(fit_headline(result, name) for name, result in results),
            _change_headline(figures),
        ],
        settings=[f"A: {values['a']}", f"B: {values['b']}"],
        warnings=[f"{name}: {line}" for name, result in results for line in warning_lines(result)],
        sections=[
            Section("Change from A to B", lines, Table(("", "A", "B", "change"), rows, left=("",))),
            bytes_by_kind(results),
            _change_table("What runs, by kind", "kind", "launches", values["kinds"]),
            _change_table(LARGE, "type", "tensors", values["large_tensors"]),
        ],
    )


def _change_headline(figures: dict[str, Change]) -> Headline:
    names = {
        "bytes": "bytes", "launches": "launches", "peak_bytes": "memory",
        "bound_s": "the bound of a step's time",
    }  # fmt: skip
    changes = ", ".join(f"{name} {_cells(figures[key])[2]}" for key, name in names.items())
    return Headline(f"From A to B: {changes}.")


def _change_table(
    title: str, name: str, count: str, groups: dict[str, dict[str, Change]]
) -> Section:
    rows = []
    for group, changes in groups.items():
        count_change, bytes_change = changes.values()
        rows.append((group, *_cells(count_change), *_cells(bytes_change, 1e9)))
    titles = (name, f"{count} A", f"{count} B", "change", "GB A", "GB B", "change")
    return Section(title, (), Table(titles, rows, left=(name,)), wide=True)
