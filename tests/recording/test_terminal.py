"""What a person is told while nothing seems to happen."""

import io
import logging
import math
import time

import pytest
from rich.console import Console

from accbench.recording import terminal
from accbench.recording.terminal import TrainingDisplay


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(terminal, "LONG_STEP_S", 0.2)
    caplog.set_level(logging.INFO, logger="accbench")
    return caplog


def test_a_long_step_is_told_less_and_less_often_and_only_while_it_lasts(lines):
    display = TrainingDisplay(Console(file=io.StringIO()), 3, ("samples", 1))
    began = time.monotonic()
    with display.report_long_steps("xla"):
        time.sleep(1.0)  # told after 0.2, 0.4 and 0.8 s
        display.step(1)
    most = 1 + int(math.log2((time.monotonic() - began) / 0.2))
    told = [
        line for line in lines.messages if "xla has been compiling, or the step runs, for" in line
    ]
    assert 1 <= len(told) <= most
    time.sleep(0.5)
    assert len(lines.messages) == len(told)


@pytest.mark.parametrize(("compiler", "console"), [(None, True), ("xla", False)])
def test_nothing_is_told_where_nothing_is_compiled_or_nobody_reads(lines, compiler, console):
    display = TrainingDisplay(Console(file=io.StringIO()) if console else None, 3, ("samples", 1))
    with display.report_long_steps(compiler):
        time.sleep(0.5)
    assert not lines.messages
