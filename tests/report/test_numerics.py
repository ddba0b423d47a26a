"""The verdict on a numerics pass, from records alone."""

import pytest

from accbench.recording.records import EndRecord, NumericsRecord
from accbench.report import numerics
from accbench.report.run import Run


def passed(scale: float, vanishing: bool = False) -> Run:
    """A pass of four steps; with `vanishing` a layer's gradient is zero in the second."""
    steps = []
    for step in range(1, 5):
        found = {"loss": 1e-7, "gradient": 1e-6, "scale": scale, "update of w": 1e-6}
        if not (vanishing and step == 2):
            found["scale of w"] = scale
        steps.append(NumericsRecord("step", step, found))
    return Run("pass", end=EndRecord("ok"), numerics=tuple(steps))


@pytest.mark.parametrize("vanishing", [False, True])
def test_a_gradient_may_vanish_in_a_step(vanishing):
    floors = [passed(1e-7, vanishing), passed(-1e-7, vanishing)]
    reference = passed(0.0)
    assert numerics.judge_run(passed(2e-7, vanishing), reference, floors).verdict == numerics.SAME
    found = numerics.judge_run(passed(0.1, vanishing), reference, floors)
    assert found.verdict == numerics.DIFFERS
