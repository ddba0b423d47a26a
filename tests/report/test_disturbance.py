"""Which rounds are measured again, by made-up windows."""

import dataclasses

import pytest

from accbench.report import analysis, comparison, statistics
from accbench.report.disturbance import RepeatRule
from accbench.report.run import RecordedRun
from tests.report import fakes

RULE = RepeatRule(max_repeats=3)


def run(num_disturbed: int, num_windows: int = 8, **fields: float) -> RecordedRun:
    windows = [fakes.window(0, 100, other_cpu_share=0.9)]  # the warm-up does not count
    for number in range(num_windows):
        use = {"other_cpu_share": 0.01, **(fields if number < num_disturbed else {})}
        windows.append(fakes.window(10 * (number + 1), 100, **use))
    return RecordedRun("r", fakes.header("ddp"), tuple(windows), end=fakes.end("ddp", False))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"other_cpu_share": 0.38}, "others used 38% of the machine in 3 of 8 windows"),
        ({"stolen_cpu_share": 0.06}, "the hypervisor took 6% of the machine in 3 of 8 windows"),
        ({"throttled_cpu_share": 0.2}, "heat or the container's limit held back 20%"),
        ({"swapped_in_bytes": 10**8}, "62,500,000 bytes a second came back from swap space"),
    ],
)
def test_a_run_is_disturbed_where_more_than_a_quarter_of_its_windows_are(fields, words):
    assert words in RULE.disturbance_of(run(3, **fields))
    assert RULE.disturbance_of(run(2, **fields)) is None


def test_swapping_is_a_rate_of_all_the_time_that_it_was_counted_over():
    """Windows of 1.6 seconds, of which every third is sampled."""
    bytes_of_all = int(2 * RULE.max_swapped_in_bytes_per_s * 1.6)
    assert RULE.disturbance_of(run(8, swapped_in_bytes=bytes_of_all, sampled_s=1.6))
    assert RULE.disturbance_of(run(8, swapped_in_bytes=bytes_of_all, sampled_s=4.8)) is None


def test_windows_that_were_not_sampled_tell_nothing():
    assert RULE.disturbance_of(run(8, other_cpu_share=None)) is None
    assert RULE.disturbance_of(RecordedRun("r")) is None


def test_a_run_is_repeated_once_and_a_comparison_does_not_go_on_for_ever():
    bad, good = run(8, other_cpu_share=0.5), run(0)
    assert RULE.asks_to_repeat(bad, [good, good, good, bad], 0, False)
    assert RULE.asks_to_repeat(bad, [bad], 0, False)  # the machine's usual state is not known yet
    assert not RULE.asks_to_repeat(good, [good], 0, False)
    assert not RULE.asks_to_repeat(bad, [good, good, good, bad], 0, True)
    assert not RULE.asks_to_repeat(bad, [good, good, good, bad], 3, False)
    assert not RULE.asks_to_repeat(bad, [bad, bad, good, bad], 0, False)


def test_a_stall_in_two_windows_of_eight_moves_the_median_by_nothing():
    stalled = run(0)
    windows = [*stalled.windows[:-2], *(fakes.window(n, 20) for n in (90, 100))]
    stalled = RecordedRun("r", stalled.header, tuple(windows), end=stalled.end)
    assert stalled.median_samples_per_s == pytest.approx(100)
    assert stalled.samples_per_s == pytest.approx(50)


@pytest.mark.parametrize(("ratios", "alone_is_wider"), [
    ((0.970, 0.974, 0.975), False), ((0.7, 1.0, 1.3), True),
])  # fmt: skip
@pytest.mark.parametrize("waited_s", [1.0, 0.0])
def test_next_to_a_disturbed_round_the_wider_interval_counts(
    ratios, alone_is_wider, waited_s, tmp_path
):
    """Rounds that lie close by chance do not narrow it, and those that scatter are not hidden."""
    plan = fakes.plan(repeats=3, repeat_rule=RULE, usual_scatter=0.05, stops_when_decided=False)
    fakes.write(tmp_path, plan)
    for row in plan.rows:
        for number, ratio in enumerate(ratios, start=1):
            share = 0.5 if number == 1 and row.folder == "xla" else 0.01
            speed = 100 * (1 if row.folder == "ddp" else ratio)
            windows = (fakes.window(step, speed, other_cpu_share=share) for step in (0, 10, 20, 30))
            end = dataclasses.replace(fakes.end(row.folder, number == 1), waited_s=waited_s)
            lines = [fakes.header(row.folder), *windows, end]
            fakes.write_run(comparison.round_folder(tmp_path, number, row), lines)
    rows = {row.name: row for row in analysis.judge(comparison.read(tmp_path)).rows}
    (_, leaning), (_, alone) = (
        statistics.mean_with_interval(ratios, usual_scatter=usual) for usual in (0.05, None)
    )
    if not waited_s:  # runs that had no other in between scatter by more than usual
        leaning, alone_is_wider = alone, True
    assert rows["inductor"].speedup_ci95 == pytest.approx(leaning)
    assert rows["xla"].speedup_ci95 == pytest.approx(alone if alone_is_wider else leaning)
