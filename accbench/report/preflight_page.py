"""A preflight's report for a terminal, as Markdown and as one HTML page without network.

What stands in it comes from outside, a model's and a compiler's names among it; it is escaped
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

PreflightResult = Mapping[str, Any]
"""A result, as `preflight.schema.json` describes it."""

_CSS = Path(__file__).with_name("page.css")
_TERMINAL_COLUMNS = 100
# Each kind has the same colour in every chart and on every page.
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
    """HTML, escaped where it is built; only a page has it."""
    wide: bool = False
    """Whether the section spans both columns of a page."""
    page_only: bool = False
    """Whether the section explains a chart, and so is of no use without one."""


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
    """A whole report: headlines, settings, warnings and sections."""

    name: str
    headlines: Sequence[Headline]
    settings: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[Section]


def terminal(document: Document) -> str:
    """Render for a terminal of 100 columns; ends in a newline."""
    console = Console(file=io.StringIO(), width=_TERMINAL_COLUMNS, force_terminal=False)
    for headline in document.headlines:
        console.print(_as_text(headline.text))
    for line in document.settings:
        console.print(_as_text(line))
    for line in document.warnings:
        console.print(_as_text(f"WARNING {line}"))
    for section in document.sections:
        if section.page_only:
            continue
        console.print()
        console.rule(_as_text(section.title), align="left")
        for line in section.lines:
            console.print(_as_text(line))
        if section.table is not None:
            console.print(_rich_table(section.table))
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).rstrip() + "\n"


def _as_text(text: str) -> Text:
    # Not as rich's markup, which also replaces `:names:` of emoji. Control characters, which a
    # terminal would obey, and line breaks become spaces.
    return Text("".join(c if c.isprintable() else " " for c in text))


def _rich_table(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, collapse_padding=True)
    shown = [i for i, title in enumerate(table.titles) if title not in table.not_in_terminal]
    for index in shown:
        title = table.titles[index]
        if title in table.left:
            # The last column, which names sources in the model, has the longest words.
            width = None if index in (0, shown[-1]) else 22
            grid.add_column(_as_text(title), justify="left", overflow="fold", max_width=width)
        else:
            grid.add_column(_as_text(title), justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(_as_text(row[index]) for index in shown))
    return grid


def as_markdown(document: Document) -> str:
    """Render as Markdown for an issue or a README; ends in a newline."""
    blocks = [f"**{markdown.plain(headline.text)}**" for headline in document.headlines]
    bullets = [*document.settings, *(f"WARNING {line}" for line in document.warnings)]
    blocks.append(markdown.bullets(bullets))
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
    """Render one HTML page with charts."""
    headlines = "".join(_headline(headline) for headline in document.headlines)
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


def _headline(headline: Headline) -> str:
    verdict = f'<b class="{"good" if headline.good else "bad"}">{escape(headline.verdict)}</b>'
    return (
        f'<p class="verdict">{escape(headline.before)}{verdict if headline.verdict else ""}'
        f"{escape(headline.after)}</p>"
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
    """Format a number with two digits or more; a dash where it is not known."""
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


def dtype(result: PreflightResult) -> str:
    """Return the dtype of the products, which autocast may choose."""
    task = result["task"]
    return str(task["amp_dtype"]) if task["amp_level"] == "O1" else "float32"


def peak_tflops(result: PreflightResult) -> tuple[str, float]:
    """Return (type, 10^12 operations/s) of products at best.

    Products in float32 may run as tf32 on tensor cores.
    """
    rates: dict[str, float] = result["gpu"]["dense_tflops"]
    wanted = dtype(result)
    names = ("tf32", "float32") if wanted == "float32" else (wanted, "float32")
    name = next(name for name in names if name in rates)
    return name, rates[name]


def memory_bound_s(result: PreflightResult) -> float:
    """Sum the bound's seconds over the kernels that take longer to move bytes than to multiply."""
    bytes_per_s = 1e9 * result["gpu"]["memory_gb_per_s"]
    return sum(
        bound_s
        for _, num_bytes, _, bound_s in result["kernels"]
        if num_bytes / bytes_per_s > 0.999 * bound_s
    )


def memory_parts(result: PreflightResult) -> dict[str, int]:
    """Return the bytes of one GPU at the step's peak, by use.

    The free memory is a part only where there is some.
    """
    memory = result["memory"]
    peak, temporaries = memory["peak_bytes"], memory["temporaries_bytes"]
    parts = {"arguments and results": peak - temporaries, "temporaries": temporaries}
    free_bytes = memory["gpu_bytes"] - peak
    return {**parts, "left for all else": free_bytes} if free_bytes > 0 else parts


def memory_bar(result: PreflightResult) -> str:
    """Chart the memory of one GPU in GiB."""
    parts = memory_parts(result)
    sizes = [size / 2**30 for size in parts.values()]
    total_gib = number(result["memory"]["gpu_bytes"] / 2**30)
    label = f"{result['gpu']['name']}: {total_gib} GiB"
    return svg.bars([(label, 0, sizes)], tuple(parts), "GiB")


def bytes_by_kind(results: Sequence[tuple[str, PreflightResult]]) -> str:
    """Chart the bytes that each kind of kernel moves, all results of a kind together.

    Kinds with less than 1 % of the largest are summed up.
    """
    largest = max((row["bytes"] for _, result in results for row in result["kinds"]), default=0)
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    shown = {
        row["kind"]: None
        for _, result in results
        for row in result["kinds"]
        if row["bytes"] > largest / 100
    }
    rows = []
    for kind in [*shown, None]:
        for name, result in results:
            moved = [row["bytes"] for row in result["kinds"]
                     if (row["kind"] if row["kind"] in shown else None) == kind]  # fmt: skip
            label = f"{name} {kind or 'all others'}".strip()
            if kind or moved:
                rows.append((label, _COLORS.get(str(kind), _OTHER_COLOR), (sum(moved) / size,)))
    return svg.bars(rows, ("bytes",), unit)


def roofline(result: PreflightResult) -> str:
    """Chart TFLOP/s at the bound over FLOP a byte, under the GPU's two roofs.

    Each dot is a kernel with products.
    """
    kernels = [row for row in result["kernels"] if row[1] and row[2] and row[3]]
    longest_s = max((row[3] for row in kernels), default=1.0)
    dots = [
        svg.Dot(
            f"{kind}: {number(num_bytes / 1e6)} MB, {number(flops / 1e9)} GFLOP, at least "
            f"{number(1e3 * bound_s)} ms",
            _COLORS.get(kind, _OTHER_COLOR), (flops / num_bytes, flops / bound_s / 1e12),
            max(2.0, 10 * (bound_s / longest_s) ** 0.5),
        )
        for kind, num_bytes, flops, bound_s in kernels
    ]  # fmt: skip
    step = result["step"]
    average = (
        (step["flops"] / step["bytes"], step["flops"] / step["bound_s"] / 1e12)
        if step["bytes"] and step["bound_s"]
        else (0.0, 0.0)
    )
    roofs = _roofs(result, [x for x, _ in [average, *(dot.point for dot in dots)] if x > 0])
    kinds = [svg.Series(kind, _COLORS.get(kind, _OTHER_COLOR), ()) for kind, *_ in kernels]
    chart = svg.logarithmic(
        dots, roofs, "FLOP a byte", "TFLOP/s at the bound", [(average, "the whole step")]
    )
    return chart + (svg.legend([*kinds, *roofs]) if dots else "")


def _roofs(result: PreflightResult, xs: Sequence[float]) -> list[svg.Series]:
    """Return the GPU's two roofs: its memory's bandwidth and its peak of products.

    They reach to a third and to three times the ridge point, or as far as dots lie.
    """
    gb_per_s = result["gpu"]["memory_gb_per_s"]
    name, tflops = peak_tflops(result)
    ridge = 1e3 * tflops / gb_per_s
    left, right = min([ridge / 3, *xs]), max([ridge * 3, *xs])
    return [
        svg.Series(f"dashed: {gb_per_s:,g} GB/s of memory", _OTHER_COLOR,
                   ((left, left * gb_per_s / 1e3), (ridge, tflops)), "dashed"),
        svg.Series(f"line: {tflops:,g} TFLOP/s of products in {name}", _OTHER_COLOR,
                   ((ridge, tflops), (right, tflops))),
    ]  # fmt: skip
