"""Looks after each round: how often they err, and what they decide."""

import dataclasses
import math

import numpy as np
import pytest

from accbench.recording import records
from accbench.report import comparison, sequential
from accbench.report.run import RecordedRun
from tests.report import fakes

REPEATS, MOST = 8, 16


def trials(shift: float, num: int, disturbed: bool = False) -> np.ndarray:
    """Return logarithms of ratios whose truth is `shift`, (num, rounds): runs scatter by 3 %."""
    random = np.random.default_rng(0)
    logs = 0.03 * random.normal(size=(num, MOST, 2))
    if disturbed:
        logs -= (random.random(logs.shape) < 0.1) * random.exponential(0.15, logs.shape)
    return logs[..., 0] - logs[..., 1] + shift


def ends(logs: np.ndarray) -> list[tuple[int, float, tuple[float, float]]]:
    """Return (rounds, speedup, interval) where each trial ends."""
    found = []
    for ratios in np.exp(logs).tolist():
        rounds = sequential.find_end(ratios, REPEATS, MOST, 0.02).num_rounds
        found.append((rounds, *sequential.mean_with_interval(ratios[:rounds], REPEATS, MOST)))
    return found


@pytest.mark.parametrize("disturbed", [False, True])
def test_equal_rows_are_called_different_at_most_once_in_twenty_over_all_looks(disturbed):
    ended = ends(trials(0.0, 3000, disturbed))
    called = sum(abs(math.log(speedup)) >= math.log(1.02) and not low <= 1 <= high
                 for _, speedup, (low, high) in ended)  # fmt: skip
    assert called / len(ended) < 0.06
    assert sum(low <= 1 <= high for _, _, (low, high) in ended) / len(ended) > 0.94


def test_large_differences_are_found_in_few_rounds_and_intervals_hold_them():
    for truth, most_rounds in ((0.45, 2.01), (1.10, 5.5)):
        ended = ends(trials(math.log(truth), 1000))
        assert np.mean([rounds for rounds, _, _ in ended]) < most_rounds
        assert np.mean([low <= truth <= high for _, _, (low, high) in ended]) > 0.95


@pytest.mark.parametrize(("scatter", "most"), [(0.13, 0.001), (0.17, 0.005)])
def test_the_look_after_two_rounds_hardly_errs_though_rounds_scatter(scatter, most):
    logs = scatter * np.random.default_rng(0).normal(size=(20_000, 2))
    ended = [sequential.find_end([*pair, None], REPEATS, MOST, 0.02)
             for pair in np.exp(logs).tolist()]  # fmt: skip
    assert sum(end == (2, True) for end in ended) / len(ended) < most


def test_the_look_after_two_rounds_decides_rows_that_are_far_off_and_no_others():
    assert sequential.find_end([0.5, 0.48], REPEATS, MOST, 0.02) == (2, True)
    assert sequential.find_end([2.1, 2.0], REPEATS, MOST, 0.02) == (2, True)
    assert sequential.find_end([0.801, 0.8, None], REPEATS, MOST, 0.02) == (REPEATS, False)
    assert sequential.find_end([0.25, 0.9, None], REPEATS, MOST, 0.02) == (REPEATS, False)
    assert sequential.find_end([0.5, 0.48], REPEATS, MOST, 0.02, looks_for_far=False)[0] > 2
    speedup, (low, high) = sequential.mean_with_interval([0.5, 0.48], REPEATS, MOST)
    assert low == pytest.approx(0.348, abs=0.001)
    assert high == pytest.approx(0.690, abs=0.001)
    # As wide as they scatter, where that is more.
    _, (low, high) = sequential.mean_with_interval([0.4, 0.8], REPEATS, MOST)
    assert high / low == pytest.approx(math.exp(3.72 * math.log(2)), rel=1e-6)


def test_one_bad_round_of_eight_rules_nothing():
    steady = [1.10, 1.11, 1.09, 1.10, 1.105, 1.095, 1.10]
    _, (low, high) = sequential.mean_with_interval([*steady, 0.7], REPEATS, REPEATS)
    assert 1.05 < low < high < 1.15


@pytest.mark.parametrize("most", [REPEATS, MOST])
def test_levels_grow_and_spend_less_than_one_look_of_all(most):
    levels = sequential.levels(REPEATS, most)
    assert list(levels) == list(range(3, most + 1))
    until_repeats = [level for rounds, level in levels.items() if rounds <= REPEATS]
    assert until_repeats == sorted(until_repeats)
    assert 0.018 < levels[REPEATS] < 0.035 < sum(levels.values())


def test_two_rows_alike_are_decided_too_and_a_missing_speed_decides_nothing():
    alike = [1.001, 0.999, 1.0, 1.0005]
    assert sequential.find_end(alike, REPEATS, MOST, 0.02) == (3, True)
    missing = [1.001, None, 1.0, 1.0, *alike]
    assert sequential.find_end(missing, REPEATS, MOST, 0.02) == (REPEATS, False)


def test_an_interval_too_wide_for_a_verdict_buys_rounds_and_a_narrow_one_does_not():
    wide = [1.3, 0.8, 1.2, 0.75, 1.35, 0.7, 1.25, 0.9] * 2
    assert sequential.find_end(wide[:8], REPEATS, MOST, 0.02) == (9, False)
    assert sequential.find_end(wide[:8], REPEATS, REPEATS, 0.02) == (8, False)
    assert sequential.find_end(wide, REPEATS, MOST, 0.02) == (MOST, False)
    assert sequential.find_end([*wide[:8], None], REPEATS, MOST, 0.02) == (9, False)
    # It ends as soon as the interval is narrow enough.
    less_wide = [1.14, 0.88, 1.12, 0.9, 1.15, 0.87, 1.12, 0.9]
    narrower = [*less_wide, 1.0, 1.01, 1.02, 0.99, 1.0, 1.01, 1.02, 0.99]
    assert sequential.find_end(narrower, REPEATS, MOST, 0.02) == (13, False)
    narrow = [1.05, 0.96, 1.03, 0.97, 1.04, 0.96, 1.03, 1.0]
    assert sequential.find_end(narrow, REPEATS, MOST, 0.02) == (REPEATS, False)


def test_no_round_begins_that_would_end_after_max_minutes():
    plan = dataclasses.replace(fakes.plan(), repeats=8, max_minutes=2)

    def rows(duration_s: float) -> list[comparison.ComparisonRow]:
        device = records.DeviceRecord(wall_s=duration_s)
        run = RecordedRun("r", fakes.header("ddp"), end=fakes.end("ddp", False), device=device)
        return [comparison.ComparisonRow(name, (run,) * 8) for name in ("ddp", "xla")]

    assert comparison.rounds_in_time(plan, rows(20.0)) == 3
    assert comparison.rounds_in_time(plan, rows(50.0)) == 2  # of which the second is late
    assert comparison.rounds_needed(plan, rows(20.0)) == {"ddp": 3, "xla": 3}
    unlimited = dataclasses.replace(plan, max_minutes=None)
    assert comparison.rounds_in_time(unlimited, rows(50.0)) == 8


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
