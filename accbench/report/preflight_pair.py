"""Two preflights side by side: every figure of both, and its change."""

from typing import Any

from accbench.report.preflight_page import Document, Headline, Result, Section, Table, number
from accbench.report.preflight_sections import (
    GIB,
    LARGE,
    NOT_COUNTED,
    PERCENT,
    bytes_by_kind,
    fits,
    setting,
    warnings_of,
    with_launches_s,
)  # fmt: skip

Change = dict[str, float | None]
"""a, b and change_percent, which is None where one is not known or a is 0."""


def _figures(result: Result) -> dict[str, tuple[str, float, float | None]]:
    """Key -> (title, what one of the title's unit is, value)."""
    step, memory = result["step"], result["memory"]
    reduction, eager = result["reduction"] or {}, result["eager"] or {}
    search, speed = result.get("batch_search") or {}, step["samples_per_s_at_most"]
    of_all = None if speed is None else speed * result["num_gpus"]
    slower_s, early = with_launches_s(result, step), reduction.get("started_before_last_product")
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
        "all_reduces": ("all-reduces", 1, len(reduction.get("all_reduces", ()))),
        "started_before_last_product": (
            "% of their bytes started before the last product", PERCENT, early),
        "largest_batch": ("largest batch that fits, of those tried", 1, search.get("largest")),
        "compile_s": ("seconds to compile", 1, result["cost"].get("compile_s")),
    }  # fmt: skip


def as_json(a: Result, b: Result) -> dict[str, Any]:
    """Both, and the changes, as plain values."""
    of_a, of_b = _figures(a), _figures(b)
    return {
        "kind": "preflight comparison",
        "schema_version": 1,
        "a": setting(a),
        "b": setting(b),
        "differ": _differ(a, b),
        "figures": {key: _change(of_a[key][2], of_b[key][2]) for key in of_a},
        "kinds": _grouped(a, b, "kinds", "kind", ("launches", "bytes")),
        "large_tensors": _grouped(a, b, "large_tensors", "element_type", ("count", "bytes")),
    }


def _change(a: float | None, b: float | None) -> Change:
    percent = 100 * (b - a) / a if a and b is not None else None
    return {"a": a, "b": b, "change_percent": percent}


def _grouped(
    a: Result, b: Result, part: str, name: str, keys: tuple[str, ...]
) -> dict[str, dict[str, Change]]:
    """Rows of a part of both, by their name; what one lacks is 0 there."""
    of_a, of_b = ({row[name]: row for row in one[part]} for one in (a, b))
    changes = {}
    for group in {**of_a, **of_b}:
        one, other = of_a.get(group, {}), of_b.get(group, {})
        changes[group] = {key: _change(one.get(key, 0), other.get(key, 0)) for key in keys}
    return changes


def _differ(a: Result, b: Result) -> list[str]:
    """What was not compiled alike, a line each."""
    asked = [
        {**one["task"], **one["versions"], "GPU": one["gpu"]["name"], "GPUs": one["num_gpus"]}
        for one in (a, b)
    ]
    keys = [key for key in {**asked[0], **asked[1]} if key != "nproc_per_node"]  # it is GPUs
    values = {key: [one.get(key) for one in asked] for key in keys}
    return [f"{key}: {one} and {other}" for key, (one, other) in values.items() if one != other]


def _cells(change: Change, unit: float = 1) -> tuple[str, str, str]:
    """Of a, of b, and what has changed."""
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


def document(a: Result, b: Result) -> Document:
    """Both side by side."""
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
    named = (("A", a), ("B", b))
    return Document(
        name=" and ".join(dict.fromkeys(str(one["task"]["model"]) for one in (a, b))),
        headlines=[*(fits(one, name) for name, one in named), _changed(figures)],
        settings=[f"A: {values['a']}", f"B: {values['b']}"],
        warnings=[f"{name}: {line}" for name, one in named for line in warnings_of(one)],
        sections=[
            Section("Change from A to B", lines, Table(("", "A", "B", "change"), rows, left=("",))),
            bytes_by_kind(named),
            _changes("What runs, by kind", "kind", "launches", values["kinds"]),
            _changes(LARGE, "type", "tensors", values["large_tensors"]),
        ],
    )


def _changed(figures: dict[str, Change]) -> Headline:
    names = {
        "bytes": "bytes", "launches": "launches", "peak_bytes": "memory",
        "bound_s": "the bound of a step's time",
    }  # fmt: skip
    changes = ", ".join(f"{name} {_cells(figures[key])[2]}" for key, name in names.items())
    return Headline(f"From A to B: {changes}.")


def _changes(title: str, name: str, count: str, groups: dict[str, dict[str, Change]]) -> Section:
    rows = []
    for group, changes in groups.items():
        of_count, of_bytes = changes.values()
        rows.append((group, *_cells(of_count), *_cells(of_bytes, 1e9)))
    titles = (name, f"{count} A", f"{count} B", "change", "GB A", "GB B", "change")
    return Section(title, (), Table(titles, rows, left=(name,)), wide=True)
