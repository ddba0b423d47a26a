"""The verdict on a numerics pass, from records alone."""

import dataclasses

import pytest

from accbench.recording.records import EndRecord, NumericsRecord
from accbench.report import comparison, numerics
from accbench.report.noise import Noise
from accbench.report.run import RecordedRun
from tests.report import fakes


def passed(scale: float, vanishing: bool = False) -> RecordedRun:
    """A pass of four steps; with `vanishing` a layer's gradient is zero in the second."""
    steps = []
    for step in range(1, 5):
        found = {"loss": 1e-7, "gradient": 1e-6, "scale": scale, "update of w": 1e-6}
        if not (vanishing and step == 2):
            found["scale of w"] = scale
        steps.append(NumericsRecord("step", step, found))
    return RecordedRun("pass", end=EndRecord("ok"), numerics=tuple(steps))


@pytest.mark.parametrize("vanishing", [False, True])
def test_a_gradient_may_vanish_in_a_step(vanishing):
    floors = [passed(1e-7, vanishing), passed(-1e-7, vanishing)]
    reference = passed(0.0)
    assert numerics.judge_run(passed(2e-7, vanishing), reference, floors).verdict == numerics.SAME
    found = numerics.judge_run(passed(0.1, vanishing), reference, floors)
    assert found.verdict == numerics.DIFFERS


def test_in_16_bits_the_size_of_a_tensors_gradient_may_be_that_of_draws_in_most_steps():
    floor = passed(0.001)
    sizes = (0.03, -0.04, 0.05, 0.001)  # in one step the draws have none
    draws = [
        NumericsRecord("noise", step, {"scale": size, "scale of w": size})
        for step, size in enumerate(sizes, 1)
    ]
    drawn = [dataclasses.replace(floor, numerics=(*floor.numerics, *draws))] * 2
    few, many = Noise([floor, floor], "bfloat16"), Noise(drawn, "bfloat16")
    assert 1.01 < few.scales_of_all("scale of w")[1] < 1.02
    assert many.scales_of_all("scale of w") == few.scales_of_all("scale of w")
    steady = [*draws[:3], NumericsRecord("noise", 4, {"scale": 0.02, "scale of w": 0.02})]
    drawn = [dataclasses.replace(floor, numerics=(*floor.numerics, *steady))] * 2
    assert Noise(drawn, "bfloat16").scales_of_all("scale of w")[1] == pytest.approx(1.021)
    # All gradients together are steady, and their size is not drawn.
    assert Noise(drawn, "bfloat16").scales_of_all("scale") == few.scales_of_all("scale")


def freely(error: float, *drawn: float) -> RecordedRun:
    """A pass of four steps and a free run whose losses are `error` off, and in draws others."""
    free = [NumericsRecord("free", step, {"loss": error}) for step in range(1, 5)]
    draws = [NumericsRecord("noise of free", 1, {"loss": off}) for off in drawn]
    noise = NumericsRecord("noise", 1, {"loss": 1e-7, "scale": 0.0})
    steps = passed(1e-7)
    return dataclasses.replace(steps, numerics=(*steps.numerics, *free, noise, *draws))


def test_free_runs_are_drawn_only_where_that_decides():
    def judged(row: RecordedRun, *drawn: float) -> tuple[str, bool]:
        floors = (freely(1e-4, *drawn),) * 2
        made = comparison.Comparison(
            "c", fakes.plan(), (comparison.ComparisonRow("xla", (), numerics=row),),
            reference=passed(0.0), floors=floors,
        )  # fmt: skip
        verdict = numerics.judge_run(row, passed(0.0), floors).verdict
        return verdict, numerics.needs_free_draws(made)

    assert judged(freely(5e-4)) == (numerics.SAME, False)
    assert judged(freely(5e-3)) == (numerics.NOT_CHECKED, True)
    assert judged(freely(5e-3), 2e-3) == (numerics.SAME, False)
    assert judged(freely(5e-3), 1e-4) == (numerics.DIFFERS, False)
    both = (*passed(0.1).numerics, *freely(5e-3).numerics[4:8])
    assert judged(dataclasses.replace(passed(0.1), numerics=both)) == (numerics.DIFFERS, False)
