"""How far a step is from float64's, where float32 itself gives out."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from accbench.comparing import distances, rank_share, update_rules
from accbench.comparing.rank_share import RankShare
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


def of_ranks(num_ranks: int, sizes: dict[str, int], measure: Callable) -> list[dict[str, float]]:
    """Call `measure` with the share of each of several ranks, which run at once."""
    barrier = threading.Barrier(num_ranks)
    told: dict[int, list[float]] = {}

    def run(rank: int) -> dict[str, float]:
        def gather(values: list[float]) -> list[list[float]]:
            told[rank] = values
            barrier.wait(timeout=20)
            of_all = [told[other] for other in range(num_ranks)]
            barrier.wait(timeout=20)
            return of_all

        return measure(RankShare(sizes, rank, num_ranks, gather))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("fault", ["none", "missing", "nan", "no gradient"])
def test_ranks_that_share_the_measuring_find_what_one_finds_alone(num_ranks, fault):
    rule = update_rules.of_task(TaskConfig(ema_decay=0.9))
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (70, 600), "b": (7,), "c": (3, 5), "d": (200,), "empty": (0,)}
    start = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    weights = update_rules.Weights.start(start, rule)
    gradients = {n: torch.randn(p.shape, generator=random) for n, p in start.items()}
    off = {n: g * 1.01 + 0.001 for n, g in gradients.items()}
    if fault == "no gradient":
        del gradients["c"], off["c"]
    after, own = weights.after(rule, gradients), weights.after(rule, off)
    against = SimpleNamespace(
        rule=rule, weights=weights, gradients=gradients, buffers={}, buffers_after={}, extra={},
        extra_after={}, weights_after=after,
    )  # fmt: skip
    optimizer = {
        name: {"step": torch.tensor(1.0), **state}
        for name, state in own.state.items() if name in gradients
    }  # fmt: skip
    if fault == "missing":
        del optimizer["b"]
    if fault == "nan":
        optimizer["d"]["exp_avg"][3] = float("nan")
    state = TrainingState(own.parameters, optimizer)
    sizes = {name: p.numel() for name, p in start.items()}
    for measure in (distances.of_step, distances.of_draw):
        alone = measure(state, against)
        shared = of_ranks(num_ranks, sizes, lambda share, m=measure: m(state, against, share))
        assert all(found.keys() == alone.keys() for found in shared)
        bounded = [{k: distances.bounded(v) for k, v in found.items()} for found in shared]
        joined = {k: max((found[k] for found in bounded), key=abs) for k in alone}
        expected = {k: distances.bounded(v) for k, v in alone.items()}
        assert joined == pytest.approx(expected, rel=1e-12)
        assert (max(expected.values()) > 1e20) == (fault in ("missing", "nan"))


def test_a_rank_with_another_state_is_seen_whatever_differs():
    def state(**changes: torch.Tensor) -> TrainingState:
        moments = {"step": torch.tensor(1.0), "exp_avg": torch.arange(6.0), **changes}
        return TrainingState({}, {"w": moments, "v": {"exp_avg": torch.ones(3)}})

    same = rank_share.crc32_of_optimizer(state())
    assert rank_share.crc32_of_optimizer(state()) == same
    others = [
        state(step=torch.tensor(2.0)),
        state(exp_avg=torch.arange(6.0).flip(0)),
        state(exp_avg=torch.arange(6.0).view(2, 3)),
        state(exp_avg=torch.arange(6.0).to(torch.bfloat16)),
        state(more=torch.zeros(0)),
        dataclasses.replace(state(), optimizer={}),
    ]
    found = {rank_share.crc32_of_optimizer(other) for other in others}
    assert len(found) == len(others)
    assert same not in found
