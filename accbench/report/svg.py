"""Charts as inline SVG.

Colours and type come from the page's style sheet, so that they follow light, dark and print. All
text is escaped here.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape

WIDTH = 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 40
Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart, with its label and colour."""

    label: str
    color: int
    """Index of the row; the style sheet has a colour for each."""
    points: tuple[Point, ...]
    style: str = ""
    """Classes besides the colour's: `faint`, `dashed`."""


def lines(
    series: Sequence[Series], x_title: str, y_title: str, height: int = 260,
    from_zero: bool = True, marks: Sequence[tuple[Point, str]] = (),
) -> str:  # fmt: skip
    """Draw a line chart over counts; `marks` are points with a text."""
    points = [point for line in series for point in line.points]
    if not points:
        return '<p class="none">not recorded</p>'
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _Axis.over(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, integer_ticks=True)
    low = min(0.0, *ys) if from_zero else min(ys)
    y_axis = _Axis.over(low, max(ys), height - _BOTTOM, _TOP)
    parts = [_grid(x_axis, y_axis, height), _titles(x_title, y_title, height)]
    for line in series:
        title = f"<title>{escape(line.label)}</title>"
        if len(line.points) == 1:  # of which a line shows nothing
            x, y = line.points[0]
            parts.append(
                f'<circle class="dot c{line.color} {line.style}" cx="{x_axis.at(x):.1f}" '
                f'cy="{y_axis.at(y):.1f}" r="3">{title}</circle>'
            )
            continue
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline class="line c{line.color} {line.style}" points="{path}">{title}</polyline>'
        )
    for (x, y), text in marks:
        right = x_axis.at(x) > WIDTH / 2
        anchor, shift = ("end", -8) if right else ("start", 8)
        parts.append(
            f'<circle class="mark" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="4"/>'
            f'<text class="note" text-anchor="{anchor}" x="{x_axis.at(x) + shift:.1f}" '
            f'y="{y_axis.at(y) - 8:.1f}">{escape(text)}</text>'
        )
    return _svg(parts, height, f"{y_title} over {x_title}") + legend(series)


def legend(series: Sequence[Series]) -> str:
    """Draw the legend: the colour of each label, once."""
    seen = {line.label: line for line in series}
    items = "".join(
        f'<li><i class="key c{line.color} {line.style}"></i>{escape(label)}</li>'
        for label, line in seen.items()
    )
    return f'<ul class="legend">{items}</ul>'


def intervals(rows: Sequence[tuple[str, int, float, float, float]], title: str) -> str:
    """Draw a dot and a whisker a row: (label, colour, middle, low, high), with a line at 1."""
    if not rows:
        return '<p class="none">no row has a speedup</p>'
    height = _TOP + 54 * len(rows) + _BOTTOM
    ends = [1.0, *(value for row in rows for value in row[2:])]
    margin = 0.06 * (max(ends) - min(ends)) or 0.05
    axis = _Axis.over(min(ends) - margin, max(ends) + margin, _RIGHT, WIDTH - _RIGHT)
    bottom = height - _BOTTOM
    parts = [_x_grid(axis, bottom)]
    x_of_1 = f"{axis.at(1):.1f}"
    parts.append(f'<line class="one" x1="{x_of_1}" x2="{x_of_1}" y1="{_TOP}" y2="{bottom}"/>')
    for number, (label, color, middle, low, high) in enumerate(rows):
        y = _TOP + 54 * number + 36
        parts.append(
            f'<text class="note" x="{_RIGHT}" y="{y - 18}">{escape(label)}</text>'
            f'<line class="whisker c{color}" x1="{axis.at(low):.1f}" x2="{axis.at(high):.1f}" '
            f'y1="{y}" y2="{y}"/>'
            f'<circle class="dot c{color}" cx="{axis.at(middle):.1f}" cy="{y}" r="6"/>'
        )
    parts.append(_titles(title, "", height))
    return _svg(parts, height, title)


def bars(
    rows: Sequence[tuple[str, int, Sequence[float]]], part_names: Sequence[str], unit: str
) -> str:
    """Draw stacked horizontal bars: (label, colour, a value for each of `part_names`).

    A single part has the row's colour; several have colours of their own.
    """
    if not rows:
        return '<p class="none">not recorded</p>'
    height = _TOP + 48 * len(rows) + _BOTTOM
    longest = max(sum(values) for _, _, values in rows)
    axis = _Axis.over(0, longest, _RIGHT, WIDTH - 84)
    parts = [_x_grid(axis, height - _BOTTOM)]
    for number, (label, color, values) in enumerate(rows):
        y, x = _TOP + 48 * number + 22, axis.at(0)
        parts.append(f'<text class="note" x="{_RIGHT}" y="{y - 7}">{escape(label)}</text>')
        for index, value in enumerate(values):
            width = axis.at(value) - axis.at(0)
            css_class = f"p{index}" if len(part_names) > 1 else f"bar c{color}"
            hover = escape(f"{part_names[index]} {value:,.1f} {unit}")
            parts.append(
                f'<rect class="{css_class}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                f'height="18"><title>{hover}</title></rect>'
            )
            x += width
        total = f"{sum(values):,.1f}" if sum(values) < 1000 else f"{sum(values):,.0f}"
        parts.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 14}">{total}</text>')
    parts.append(_titles(unit, "", height))
    items = "".join(
        f'<li><i class="key p{index}"></i>{escape(name)}</li>'
        for index, name in enumerate(part_names)
    )
    key = f'<ul class="legend">{items}</ul>' if len(part_names) > 1 else ""
    return _svg(parts, height, unit) + key


@dataclasses.dataclass(frozen=True)
class Dot:
    """A point of a scatter plot."""

    label: str
    """Text that is shown on hovering."""
    color: int
    point: Point
    radius: float = 3.0


def logarithmic(
    dots: Sequence[Dot], series: Sequence[Series], x_title: str, y_title: str,
    marks: Sequence[tuple[Point, str]] = (), height: int = 320,
) -> str:  # fmt: skip
    """Draw dots and lines over two logarithmic axes; coordinates at or under 0 are left out."""
    dots = [dot for dot in dots if min(dot.point) > 0]
    marks = [mark for mark in marks if min(mark[0]) > 0]
    points = [p for line in series for p in line.points] + [point for point, _ in marks]
    points += [dot.point for dot in dots]
    if not dots:
        return '<p class="none">not recorded</p>'
    # Room at the right for half of the last number.
    x_axis = _LogAxis.around([x for x, _ in points], _LEFT, WIDTH - 2 * _RIGHT)
    y_axis = _LogAxis.around([y for _, y in points], height - _BOTTOM, _TOP)
    parts = [_grid(x_axis, y_axis, height), _titles(x_title, y_title, height)]
    for line in series:
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line c{line.color} {line.style}" points="{path}"/>')
    # The large ones first, or they would hide the small ones.
    for dot in sorted(dots, key=lambda dot: -dot.radius):
        x, y = dot.point
        parts.append(
            f'<circle class="dot c{dot.color} spot" cx="{x_axis.at(x):.1f}" '
            f'cy="{y_axis.at(y):.1f}" r="{dot.radius:.1f}"><title>{escape(dot.label)}</title>'
            "</circle>"
        )
    for (x, y), text in marks:
        parts.append(
            f'<circle class="mark" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="4"/>'
            f'<text class="note" x="{x_axis.at(x) + 8:.1f}" y="{y_axis.at(y) + 14:.1f}">'
            f"{escape(text)}</text>"
        )
    return _svg(parts, height, f"{y_title} over {x_title}")


@dataclasses.dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    integer_ticks: bool = False
    """Ticks at whole numbers alone."""

    @staticmethod
    def over(
        low: float, high: float, start: float, end: float, integer_ticks: bool = False
    ) -> "_Axis":
        if high <= low:
            low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        return _Axis(low, high, start, end, integer_ticks)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five values, at 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        step = max(step, 1.0) if self.integer_ticks else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        # Without the last digits, which rounding gives to 3 * 0.1.
        return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


class _LogAxis(_Axis):
    """From one power of ten to another; `low` and `high` are their exponents."""

    @staticmethod
    def around(values: Sequence[float], start: float, end: float) -> "_LogAxis":
        """Return an axis from the power of ten below all `values` to the one above.

        All values are above 0.
        """
        low = math.floor(math.log10(min(values)) + 1e-9)
        high = math.ceil(math.log10(max(values)) - 1e-9)
        return _LogAxis(low, max(high, low + 1), start, end)

    def at(self, value: float) -> float:
        return super().at(math.log10(value))

    def ticks(self) -> list[float]:
        """Return the powers of ten."""
        return [10.0**exponent for exponent in range(int(self.low), int(self.high) + 1)]


def _tick(value: float) -> str:
    """Write all digits of a tick, for ticks may differ in the last one alone."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.12g}"
    digits, _, exponent = f"{value:.11e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def _x_grid(axis: _Axis, bottom: float) -> str:
    return "".join(
        f'<line class="grid" x1="{axis.at(t):.1f}" x2="{axis.at(t):.1f}" y1="{_TOP}" '
        f'y2="{bottom}"/>'
        f'<text class="tick" text-anchor="middle" x="{axis.at(t):.1f}" y="{bottom + 16}">'
        f"{_tick(t)}</text>"
        for t in axis.ticks()
    )


def _grid(x_axis: _Axis, y_axis: _Axis, height: float) -> str:
    bottom = height - _BOTTOM
    xs = "".join(
        f'<text class="tick" text-anchor="middle" x="{x_axis.at(t):.1f}" y="{bottom + 16}">'
        f"{_tick(t)}</text>"
        for t in x_axis.ticks()
    )
    ys = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y_axis.at(t):.1f}" '
        f'y2="{y_axis.at(t):.1f}"/><text class="tick" text-anchor="end" x="{_LEFT - 6}" '
        f'y="{y_axis.at(t) + 4:.1f}">{_tick(t)}</text>'
        for t in y_axis.ticks()
    )
    return xs + ys


def _titles(x_title: str, y_title: str, height: float) -> str:
    middle = (height - _BOTTOM + _TOP) / 2
    x_label = (
        f'<text class="title" text-anchor="middle" x="{WIDTH / 2}" y="{height - 6}">'
        f"{escape(x_title)}</text>"
    )
    if not y_title:
        return x_label
    return x_label + (
        f'<text class="title" text-anchor="middle" transform="translate(12 {middle}) '
        f'rotate(-90)">{escape(y_title)}</text>'
    )


def _svg(parts: Sequence[str], height: int, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">'
        f"{''.join(parts)}</svg>"
    )
