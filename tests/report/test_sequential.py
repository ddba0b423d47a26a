"""Looks after each round: how often they err, and what they decide."""

import dataclasses
import math

import numpy as np
import pytest

from accbench.report import comparison, sequential
from accbench.report.run import RecordedRun
from tests.report import fakes

REPEATS = 8


def trials(shift: float, num: int, disturbed: bool = False) -> np.ndarray:
    """Return logarithms of ratios whose truth is `shift`, (num, rounds): runs scatter by 3 %."""
    random = np.random.default_rng(0)
    logs = 0.03 * random.normal(size=(num, REPEATS, 2))
    if disturbed:
        logs -= (random.random(logs.shape) < 0.1) * random.exponential(0.15, logs.shape)
    return logs[..., 0] - logs[..., 1] + shift


def ends(logs: np.ndarray) -> list[tuple[int, float, tuple[float, float]]]:
    """Return (rounds, speedup, interval) where each trial ends."""
    found = []
    for ratios in np.exp(logs).tolist():
        rounds = sequential.rounds_until_decided(ratios, REPEATS, 0.02) or REPEATS
        found.append((rounds, *sequential.mean_with_interval(ratios[:rounds], REPEATS)))
    return found


@pytest.mark.parametrize("disturbed", [False, True])
def test_equal_rows_are_called_different_at_most_once_in_twenty_over_all_looks(disturbed):
    ended = ends(trials(0.0, 3000, disturbed))
    called = sum(abs(math.log(speedup)) >= math.log(1.02) and not low <= 1 <= high
                 for _, speedup, (low, high) in ended)  # fmt: skip
    assert called / len(ended) < 0.06
    assert sum(low <= 1 <= high for _, _, (low, high) in ended) / len(ended) > 0.94


def test_large_differences_are_found_in_few_rounds_and_intervals_hold_them():
    for truth, most_rounds in ((0.45, 3.2), (1.10, 5.5)):
        ended = ends(trials(math.log(truth), 1000))
        assert np.mean([rounds for rounds, _, _ in ended]) < most_rounds
        assert np.mean([low <= truth <= high for _, _, (low, high) in ended]) > 0.95


def test_one_bad_round_of_eight_rules_nothing():
    steady = [1.10, 1.11, 1.09, 1.10, 1.105, 1.095, 1.10]
    _, (low, high) = sequential.mean_with_interval([*steady, 0.7], REPEATS)
    assert 1.05 < low < high < 1.15


def test_levels_grow_and_spend_less_than_one_look_of_all():
    levels = sequential.levels(REPEATS)
    assert list(levels) == [3, 4, 5, 6, 7, 8]
    assert list(levels.values()) == sorted(levels.values())
    assert 0.02 < levels[8] < 0.035 < sum(levels.values())


def test_two_rows_alike_are_decided_too_and_a_missing_speed_decides_nothing():
    alike = [1.001, 0.999, 1.0, 1.0005]
    assert sequential.rounds_until_decided(alike, REPEATS, 0.02) == 3
    assert sequential.rounds_until_decided([1.001, None, 1.0, 1.0], REPEATS, 0.02) is None


def test_rounds_of_a_decided_row_end_and_the_baseline_goes_on_with_the_others():
    plan = dataclasses.replace(fakes.plan(), repeats=5, stops_when_decided=True)

    def row(name: str, speeds: list[float | None]) -> comparison.ComparisonRow:
        runs = [
            RecordedRun("r") if speed is None else RecordedRun(
                "r", fakes.header(name), (fakes.window(0, speed), fakes.window(10, speed)),
                end=fakes.end(name, False),
            )
            for speed in speeds
        ]  # fmt: skip
        return comparison.ComparisonRow(name, tuple(runs))

    rows = [
        row("ddp", [100, 101, 99, 100, None]),
        row("inductor", [125, 100, 120, 110, None]),
        row("xla", [50, 50.5, 49.6, None, None]),
    ]
    assert comparison.rounds_needed(plan, rows) == {"ddp": 5, "inductor": 5, "xla": 3}
    rows[1] = row("inductor", [125, 126, 124, 125, None])
    assert comparison.rounds_needed(plan, rows) == {"ddp": 3, "inductor": 3, "xla": 3}
    before = dataclasses.replace(plan, stops_when_decided=False)
    assert set(comparison.rounds_needed(before, rows).values()) == {5}
