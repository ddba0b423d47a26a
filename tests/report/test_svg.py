"""Charts, by the numbers and the shapes that are in them."""

import re

import pytest

from accbench.report import svg


def labels(*points: svg.Point) -> list[str]:
    """The numbers beside the y axis, from below."""
    drawn = svg.lines([svg.Series("row", 0, points)], "step", "value")
    return re.findall(r'text-anchor="end"[^>]*>([^<]*)</text>', drawn)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0.5, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        (1e5, ["0", "20,000", "40,000", "60,000", "80,000", "100,000"]),
        (250_000, ["0", "50,000", "100,000", "150,000", "200,000", "250,000"]),
        (7.5e6, ["0", "2e6", "4e6", "6e6"]),
        (1.2e6, ["0", "500,000", "1e6"]),
        (6e-4, ["0", "0.0002", "0.0004", "0.0006"]),
        (2.5e-13, ["0", "5e-14", "1e-13", "1.5e-13", "2e-13", "2.5e-13"]),
    ],
)
def test_an_axis_has_the_numbers_of_its_ticks(largest, expected):
    assert labels((0, 0), (1, largest)) == expected


def test_ticks_that_differ_late_differ_in_their_labels():
    drawn = svg.lines(
        [svg.Series("row", 0, ((0, 12_345_600), (1, 12_345_650)))], "step", "value", from_zero=False
    )
    found = re.findall(r'text-anchor="end"[^>]*>([^<]*)</text>', drawn)
    assert found[:2] == ["1.23456e7", "1.234561e7"]
    assert len({*found}) == len(found) == 6


def test_a_single_point_is_a_dot():
    """As of a run of one window, or with one evaluation."""
    one = svg.lines([svg.Series("a <row>", 2, ((3, 1.5),), "faint")], "step", "loss")
    assert re.search(r'<circle class="dot c2 faint"[^>]*><title>a &lt;row&gt;</title>', one)
    assert "<polyline" not in one
    two = svg.lines([svg.Series("a row", 2, ((3, 1.5), (4, 1.0)))], "step", "loss")
    assert "<circle" not in two
    assert "<polyline" in two
