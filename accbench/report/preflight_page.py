"""A preflight's sections in a terminal, in Markdown and as one page without network, with charts.

What stands in them comes from outside, a model's and a compiler's names among it; it is escaped
here.
"""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from accbench.report import markdown, svg

Result = Mapping[str, Any]
"""As `preflight.schema.json` describes it."""

_CSS = Path(__file__).with_name("page.css")
_TERMINAL_COLUMNS = 100
# A kind has its colour in every chart and on every page.
_COLORS = {"convolution": 0, "matrix product": 1, "loop fusion": 2, "reduction fusion": 3,
           "transpose": 4}  # fmt: skip
_OTHER_COLOR = 5


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells under titles."""

    titles: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left: tuple[str, ...] = ()
    """Titles of columns of words; the others hold numbers and stand at the right."""
    not_in_terminal: tuple[str, ...] = ()
    """Titles of columns for which a terminal has no room."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part with a title: sentences, then a table, then a chart."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None
    chart: str = ""
    """HTML, escaped where it was made; only a page has it."""
    wide: bool = False
    """On a page: over both columns."""
    page_only: bool = False
    """It explains a chart, without which it is of no use."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """A sentence whose middle says whether all is well."""

    before: str
    verdict: str = ""
    after: str = ""
    good: bool = True

    @property
    def text(self) -> str:
        """The whole sentence."""
        return self.before + self.verdict + self.after


@dataclasses.dataclass(frozen=True)
class Document:
    """What is said first, and the sections."""

    name: str
    headlines: Sequence[Headline]
    settings: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[Section]


def terminal(document: Document) -> str:
    """For a terminal of 100 columns; ends in a newline."""
    console = Console(file=io.StringIO(), width=_TERMINAL_COLUMNS, force_terminal=False)
    for headline in document.headlines:
        console.print(_words(headline.text))
    for line in document.settings:
        console.print(_words(line))
    for line in document.warnings:
        console.print(_words(f"WARNING {line}"))
    for section in document.sections:
        if section.page_only:
            continue
        console.print()
        console.rule(_words(section.title), align="left")
        for line in section.lines:
            console.print(_words(line))
        if section.table is not None:
            console.print(_grid(section.table))
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).rstrip() + "\n"


def _words(text: str) -> Text:
    # Not as rich's markup, which knows `:names:` of emoji too; and what a terminal would obey
    # or what would break a line is a space.
    return Text("".join(c if c.isprintable() else " " for c in text))


def _grid(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, collapse_padding=True)
    kept = [i for i, title in enumerate(table.titles) if title not in table.not_in_terminal]
    for index in kept:
        title = table.titles[index]
        if title in table.left:
            # The last column, of sources in the model, has the longest words.
            width = None if index in (0, kept[-1]) else 22
            grid.add_column(_words(title), justify="left", overflow="fold", max_width=width)
        else:
            grid.add_column(_words(title), justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(_words(row[index]) for index in kept))
    return grid


def as_markdown(document: Document) -> str:
    """For an issue or a README; ends in a newline."""
    blocks = [f"**{markdown.plain(one.text)}**" for one in document.headlines]
    said = [*document.settings, *(f"WARNING {line}" for line in document.warnings)]
    blocks.append(markdown.bullets(said))
    for section in document.sections:
        if section.page_only:
            continue
        blocks.append(f"### {markdown.plain(section.title)}")
        if section.lines:
            blocks.append(markdown.bullets(section.lines))
        if section.table is not None:
            table = section.table
            blocks.append(markdown.table(table.titles, table.left, table.rows))
    return "\n\n".join(blocks) + "\n"


def page(document: Document) -> str:
    """One HTML page."""
    headlines = "".join(_headline(one) for one in document.headlines)
    settings = "<br>".join(escape(line) for line in document.settings)
    warnings = "".join(
        f'<p class="mixed">warning: {escape(line)}</p>' for line in document.warnings
    )
    cards = "".join(_card(section) for section in document.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>accbench preflight: {escape(document.name)}</title>"
        f"<style>{_CSS.read_text(encoding='utf-8')}</style></head>"
        f'<body><main class="preflight"><h1>accbench preflight · {escape(document.name)}</h1>'
        f'{headlines}<p class="setting">{settings}</p>{warnings}'
        f'<div class="cards">{cards}</div></main></body></html>\n'
    )


def _headline(one: Headline) -> str:
    verdict = f'<b class="{"good" if one.good else "bad"}">{escape(one.verdict)}</b>'
    return (
        f'<p class="verdict">{escape(one.before)}{verdict if one.verdict else ""}'
        f"{escape(one.after)}</p>"
    )


def _card(section: Section) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    table = _html_table(section.table) if section.table is not None else ""
    return (
        f'<section class="card{" wide" if section.wide else ""}"><h2>{escape(section.title)}</h2>'
        f"{lines}{table}{section.chart}</section>"
    )


def _html_table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if title in table.left else ''}>{escape(cell)}</{tag}>"
            for title, cell in zip(table.titles, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table><thead><tr>{line("th", table.titles)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def number(value: float | None) -> str:
    """With three digits or more; a dash where it is not known."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if 0 < size < 1e-4:
        return "<0.0001"
    if 0 < size < 1:
        return f"{value:#.2g}"
    return f"{value:,.{0 if size >= 100 or not size else 1 if size >= 10 else 2}f}"


def dtype(result: Result) -> str:
    """The type of what is multiplied, where autocast may choose."""
    task = result["task"]
    return str(task["amp_dtype"]) if task["amp_level"] == "O1" else "float32"


def peak_tflops(result: Result) -> tuple[str, float]:
    """(type, 10^12 operations/s) of products at best; float32 may be tf32 on tensor cores."""
    rates: dict[str, float] = result["gpu"]["dense_tflops"]
    wanted = dtype(result)
    names = ("tf32", "float32") if wanted == "float32" else (wanted, "float32")
    name = next(name for name in names if name in rates)
    return name, rates[name]


def memory_bound_s(result: Result) -> float:
    """Seconds of the bound in kernels whose bytes take longer than their products."""
    bytes_per_s = 1e9 * result["gpu"]["memory_gb_per_s"]
    return sum(
        bound_s
        for _, num_bytes, _, bound_s in result["kernels"]
        if num_bytes / bytes_per_s > 0.999 * bound_s
    )


def memory_parts(result: Result) -> dict[str, int]:
    """Bytes of one GPU at the step's peak; what is left, only where something is."""
    memory = result["memory"]
    peak, temporaries = memory["peak_bytes"], memory["temporaries_bytes"]
    parts = {"arguments and results": peak - temporaries, "temporaries": temporaries}
    left = memory["gpu_bytes"] - peak
    return {**parts, "left for all else": left} if left > 0 else parts


def memory_bar(result: Result) -> str:
    """GiB of one GPU."""
    parts = memory_parts(result)
    sizes = [size / 2**30 for size in parts.values()]
    there = number(result["memory"]["gpu_bytes"] / 2**30)
    label = f"{result['gpu']['name']}: {there} GiB"
    return svg.bars([(label, 0, sizes)], tuple(parts), "GiB")


def bytes_by_kind(named: Sequence[tuple[str, Result]]) -> str:
    """Bars, a kind's of all results together; kinds that hardly show are summed up."""
    whole = max((row["bytes"] for _, one in named for row in one["kinds"]), default=0)
    unit, size = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)
    shown = {
        row["kind"]: None for _, one in named for row in one["kinds"] if row["bytes"] > whole / 100
    }
    rows = []
    for kind in [*shown, None]:
        for name, one in named:
            moved = [row["bytes"] for row in one["kinds"]
                     if (row["kind"] if row["kind"] in shown else None) == kind]  # fmt: skip
            label = f"{name} {kind or 'all others'}".strip()
            if kind or moved:
                rows.append((label, _COLORS.get(str(kind), _OTHER_COLOR), (sum(moved) / size,)))
    return svg.bars(rows, ("bytes",), unit)


def roofline(result: Result) -> str:
    """Kernels with products: TFLOP/s at the bound over FLOP a byte, under the GPU's two roofs."""
    found = [row for row in result["kernels"] if row[1] and row[2] and row[3]]
    longest_s = max((row[3] for row in found), default=1.0)
    dots = [
        svg.Dot(
            f"{kind}: {number(num_bytes / 1e6)} MB, {number(flops / 1e9)} GFLOP, at least "
            f"{number(1e3 * bound_s)} ms",
            _COLORS.get(kind, _OTHER_COLOR), (flops / num_bytes, flops / bound_s / 1e12),
            max(2.0, 10 * (bound_s / longest_s) ** 0.5),
        )
        for kind, num_bytes, flops, bound_s in found
    ]  # fmt: skip
    step = result["step"]
    average = (
        (step["flops"] / step["bytes"], step["flops"] / step["bound_s"] / 1e12)
        if step["bytes"] and step["bound_s"]
        else (0.0, 0.0)
    )
    roofs = _roofs(result, [x for x, _ in [average, *(dot.point for dot in dots)] if x > 0])
    kinds = [svg.Series(kind, _COLORS.get(kind, _OTHER_COLOR), ()) for kind, *_ in found]
    chart = svg.logarithmic(
        dots, roofs, "FLOP a byte", "TFLOP/s at the bound", [(average, "the whole step")]
    )
    return chart + (svg.legend([*kinds, *roofs]) if dots else "")


def _roofs(result: Result, xs: Sequence[float]) -> list[svg.Series]:
    """From a little left of their meeting to a little right of it, or as far as dots lie."""
    gb_per_s = result["gpu"]["memory_gb_per_s"]
    name, tflops = peak_tflops(result)
    meeting = 1e3 * tflops / gb_per_s
    left, right = min([meeting / 3, *xs]), max([meeting * 3, *xs])
    return [
        svg.Series(f"dashed: {gb_per_s:,g} GB/s of memory", _OTHER_COLOR,
                   ((left, left * gb_per_s / 1e3), (meeting, tflops)), "dashed"),
        svg.Series(f"line: {tflops:,g} TFLOP/s of products in {name}", _OTHER_COLOR,
                   ((meeting, tflops), (right, tflops))),
    ]  # fmt: skip
