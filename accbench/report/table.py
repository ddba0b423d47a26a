"""Runs side by side: a terminal table, Markdown or JSON."""

import dataclasses
import io
import json
from collections.abc import Callable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from accbench.report import markdown
from accbench.report.summary import RunSummary

_NOT_KNOWN = "-"


def _ratio(row: RunSummary, first: RunSummary) -> str:
    if row.samples_per_s is None or first.samples_per_s is None:
        return _NOT_KNOWN
    return f"{row.samples_per_s / first.samples_per_s:.2f}x"


def _format(value: float | None, pattern: str) -> str:
    return _NOT_KNOWN if value is None else pattern.format(value)


def _mib(num_bytes: int | None) -> str:
    return _format(num_bytes and num_bytes / 2**20, "{:,.0f}")


Cell = Callable[[RunSummary, RunSummary], str]
_COLUMNS: dict[str, Cell] = {
    "ratio": _ratio,
    "step ms": lambda row, _: _format(row.step_ms, "{:,.1f}"),
    "first step s": lambda row, _: _format(row.time_to_first_step_s, "{:.1f}"),
    "compile s": lambda row, _: _format(row.compile_s, "{:.1f}"),
    "peak MiB": lambda row, _: _mib(row.peak_memory_bytes),
    "last loss": lambda row, _: _format(row.last_loss, "{:.4f}"),
    "status": lambda row, _: row.status,
}
LEFT = ("engine", "status")


def _common_unit(rows: list[RunSummary]) -> tuple[str, int]:
    """Return the unit that the rows' speeds are told in, and units a sample."""
    units = {(row.unit, row.units_per_sample) for row in rows}
    return units.pop() if len(units) == 1 else ("samples", 1)


def columns(rows: list[RunSummary]) -> dict[str, Cell]:
    """Return the columns: title -> cell of a row, given the first row."""
    unit, units_per_sample = _common_unit(rows)

    def speed(row: RunSummary, _: RunSummary) -> str:
        return _format(row.samples_per_s and row.samples_per_s * units_per_sample, "{:,.1f}")

    titles: dict[str, Cell] = {"engine": lambda row, _: row.engine, f"{unit}/s": speed}
    if any(row.tflop_per_s for row in rows):
        titles["TFLOP/s"] = lambda row, _: _format(row.tflop_per_s, "{:,.3g}")
    if any(row.peak_share for row in rows):
        titles["of peak"] = lambda row, _: _format(row.peak_share, "{:.0%}")
    if any((row.warmup_peak_memory_bytes or 0) > (row.peak_memory_bytes or 0) for row in rows):
        titles["warm-up peak MiB"] = lambda row, _: _mib(row.warmup_peak_memory_bytes)
    return {**titles, **_COLUMNS}


def caption(rows: list[RunSummary]) -> list[str]:
    """Return what the rows share and what the numbers are, one line each."""
    settings = {_setting(row) for row in rows}
    lines = sorted(settings) if len(settings) == 1 else ["settings differ between the rows:"]
    if len(settings) > 1:
        lines += [f"{row.name}: {_setting(row)}" for row in rows]
    lines.append(
        f"{_common_unit(rows)[0]}/s of all workers after the warm-up; ratio to the first row"
    )
    return lines + [f"{row.name}: {row.error}" for row in rows if row.error]


def _setting(row: RunSummary) -> str:
    num = row.devices_per_worker
    device = f"{row.world_size * num} x {row.device}"
    worker = "a worker" if num == 1 else f"a worker of {num} devices"
    return f"{row.model}, {device}, {row.amp}, batch {row.batch_size} {worker}"


def render(rows: list[RunSummary], format: str, mixed: Sequence[str] = ()) -> str:
    """Render all rows as table, md or json, ending in a newline.

    `mixed` are the settings in which they differ; JSON has each row's own.
    """
    if format == "json":
        return json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"
    titles = columns(rows)
    cells = [[cell(row, rows[0]) for cell in titles.values()] for row in rows]
    notes = [*caption(rows), *(f"MIXED {line}" for line in mixed)]
    if format == "md":
        body = markdown.table(list(titles), LEFT, cells)
        return f"{body}\n\n{markdown.bullets(notes)}\n"
    return in_terminal([*titles], LEFT, cells, width=120, after=notes)


def in_terminal(
    titles: Sequence[str], left: Sequence[str], rows: Sequence[Sequence[str]], width: int,
    before: Sequence[str] = (), after: Sequence[str] = (),
) -> str:  # fmt: skip
    """Draw a table for a terminal, between lines of text; ends in a newline.

    A table wider than `width` characters gets its titles folded, and then the cells of the columns
    `left`, both at blanks. No number and no word is cut: if that is not enough, the table is wider.
    """
    grid = Table(box=box.SIMPLE_HEAD)
    column_widths = _column_widths(titles, left, rows, width)
    for title, column_width in zip(titles, column_widths, strict=True):
        justify: JustifyMethod = "left" if title in left else "right"
        grid.add_column(Text(title), justify=justify, width=column_width, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    file = io.StringIO()
    console = Console(file=file, width=_full_width(column_widths), force_terminal=False)
    for line in before:
        console.print(Text(line), soft_wrap=True)
    console.print(grid)
    for line in after:
        console.print(Text(line), soft_wrap=True)
    return file.getvalue()


def _full_width(column_widths: Sequence[int]) -> int:
    """Return the width of a table with these columns, between blanks and at the edges."""
    return sum(column_widths) + 3 * len(column_widths) + 1


def _column_widths(
    titles: Sequence[str], left: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    """Return the characters of each column, narrowed as far as `width` asks and words allow."""
    widths, least_widths = [], []
    for title, *cells in zip(titles, *rows, strict=True):
        lines = [line for text in (title, *cells) for line in text.splitlines()]
        unbroken = [*title.split(), *(" ".join(cells).split() if title in left else cells)]
        widths.append(max(map(cell_len, lines), default=1))
        least_widths.append(max(map(cell_len, unbroken), default=1))
    for narrows_words in (False, True):
        columns = [i for i, title in enumerate(titles) if (title in left) == narrows_words]
        while columns and _full_width(widths) > width:
            widest = max(columns, key=lambda i: widths[i] - least_widths[i])
            if widths[widest] <= least_widths[widest]:
                break
            widths[widest] -= 1
    return widths
