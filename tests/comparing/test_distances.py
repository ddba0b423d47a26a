"""How far a step is from float64's, where float32 itself gives out."""

from types import SimpleNamespace

import pytest
import torch

from accbench.comparing import distances, update_rules
from accbench.config import TaskConfig
from accbench.engines.common.optimizer_state import AVERAGE
from accbench.engines.common.training_state import TrainingState

DENORMAL = 1e-40


def step_of(gradient: float, second_moment: float, own: float) -> dict[str, float]:
    """AdamW's step of a parameter of eight equal elements.

    Args:
        second_moment: before the step.
        own: an engine's, after it.
    """
    rule = update_rules.of_task(TaskConfig())
    before = {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.full((8,), second_moment)}
    weights = SimpleNamespace(
        parameters={"w": torch.ones(8)}, state={"w": before}, num_steps={"w": 1}
    )
    expected = torch.full((8,), gradient)
    moved, after = rule.step(weights.parameters["w"], before, expected, 2)
    against = SimpleNamespace(
        rule=rule, weights=weights, gradients={"w": expected}, buffers={}, buffers_after={},
        extra={}, extra_after={}, weights_after=SimpleNamespace(num_steps={"w": 2}),
    )  # fmt: skip
    state = {"step": torch.tensor(2.0), **after, "exp_avg_sq": torch.full((8,), own)}
    return distances.of_step(TrainingState({"w": moved}, {"w": state}), against)


@pytest.mark.parametrize(
    ("gradient", "before", "own"),
    [
        (1e-30, DENORMAL, 0.0),  # what was loaded is flushed
        (1e-19, 0.0, 0.0),  # the square is
        (1e-19, DENORMAL, 0.999 * DENORMAL + 0.001 * 1e-38),  # nothing is
    ],
)
def test_second_moments_below_float32s_normal_numbers_may_be_zero(gradient, before, own):
    assert step_of(gradient, before, own)["second moment of w"] == 0


def test_second_moments_that_are_small_are_held_to_what_they_should_be():
    right = 0.999e-34 + 0.001 * 1e-30
    assert step_of(1e-15, 1e-34, right)["second moment of w"] < 1e-5
    assert step_of(1e-15, 1e-34, 1e-34)["second moment of w"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("own", [float("nan"), float("inf")])
def test_second_moments_that_are_no_numbers_are_far_off(own):
    assert step_of(1e-3, 1e-6, own)["second moment of w"] > 1e20


def test_averages_that_are_no_numbers_are_far_off():
    rule = update_rules.of_task(TaskConfig(ema_decay=0.9))
    start = update_rules.Weights.start({"w": torch.ones(8)}, rule)
    gradients = {"w": torch.full((8,), 0.1)}
    after = start.after(rule, gradients)
    against = SimpleNamespace(
        rule=rule, weights=start, gradients=gradients, buffers={}, buffers_after={}, extra={},
        extra_after={}, weights_after=after,
    )  # fmt: skip

    def distance(average: torch.Tensor) -> float:
        state = {"step": torch.tensor(1.0), **after.state["w"], AVERAGE: average}
        of_step = distances.of_step(
            TrainingState({"w": after.parameters["w"]}, {"w": state}), against
        )
        return of_step["average of w"]

    assert distance(after.state["w"][AVERAGE]) < 1e-3
    assert distance(torch.full((8,), float("nan"))) > 1e20
