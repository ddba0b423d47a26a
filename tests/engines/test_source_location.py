"""The line of a model that messages name."""

import statistics
import traceback
from importlib.util import find_spec
from pathlib import Path

import pytest

from accbench.engines.common import source_location


def _raise_in_the_standard_library() -> None:
    statistics.mean([])


def test_a_line_of_the_standard_library_is_not_the_model_s():
    with pytest.raises(statistics.StatisticsError) as caught:
        _raise_in_the_standard_library()
    line = source_location.find_model_line(traceback.extract_tb(caught.value.__traceback__))
    assert line is not None
    assert line.startswith(f"{Path(__file__)}:")
    assert line.endswith(": statistics.mean([])")


def test_a_line_of_an_installed_package_is_the_model_s():
    spec = find_spec("pytest")  # it lies in the standard library's folder
    frame = traceback.FrameSummary(str(spec.origin), 3, "forward", line="x + y")
    assert source_location.find_model_line([frame]) == f"{spec.origin}:3: x + y"
