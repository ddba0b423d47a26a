"""Verdicts and reports of made-up records: what is planted must be named."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from accbench import cli
from accbench.errors import RequestError
from accbench.recording import records
from accbench.report import (
    analysis,
    comparison,
    comparison_table,
    losses,
    publish,
    statistics,
    summary,
    table,
)
from tests.report import fakes

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = Path(comparison.__file__).with_name("comparison.schema.json")


@pytest.fixture
def folder(tmp_path) -> Path:
    return fakes.write(tmp_path / "fake")


def round_of(folder: Path, number: int, row: str) -> Path:
    return folder / "rounds" / f"{number:02}" / row


def rewrite(folder: Path, engine: str, change) -> None:
    """Pass every record of an engine's rounds through `change`."""
    for number in range(1, 6):
        found = [change(record) for record in fakes.run(engine, number)]
        fakes.write_run(round_of(folder, number, engine), found)


def replaced(kind: type, **values):
    """A change of `rewrite`: records of `kind` get other values; of windows, steady ones."""

    def change(record):
        if isinstance(record, kind) and not getattr(record, "warmup", False):
            return dataclasses.replace(record, **values)
        return record

    return change


def row_of(folder: Path, name: str) -> analysis.RowResult:
    result = analysis.judge(comparison.read(folder, allow_mixed=True))
    return next(row for row in result.rows if row.name == name)


@pytest.mark.parametrize("format", ["md", "json"])
def test_golden(folder, format):
    """Committed output for committed records, to the letter."""
    rendered = publish.render([comparison.read(folder)], format)
    assert rendered == (GOLDEN / f"comparison.{format}").read_text()


def test_json_fits_the_published_schema(folder):
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    values = json.loads(publish.render([comparison.read(folder)], "json"))
    jsonschema.validate(values, schema)
    assert set(schema["$defs"]["row"]["properties"]) == set(values["rows"][0])
    fakes.write_run(round_of(folder, 1, "xla"), [records.EndRecord("oom", "no memory")])
    fakes.write_run(folder / "numerics" / "xla", [records.EndRecord("oom", "no memory")])
    jsonschema.validate(json.loads(publish.render([comparison.read(folder)], "json")), schema)


def test_verdicts_and_cost_of_good_records(folder):
    rows = {name: row_of(folder, name) for name in fakes.SPEED}
    assert {name: row.verdict for name, row in rows.items()} == {
        "ddp": "baseline",
        "inductor": "faster",
        "xla": "slower",
    }
    inductor = rows["inductor"]
    # 26 s more before the first step; 160 ms and 128 ms a step.
    assert inductor.cost.break_even_steps == 813
    assert inductor.cost.break_even_steps_warm == 157
    assert inductor.cost.break_even_samples == 813 * 16
    assert rows["xla"].cost.break_even_steps is None
    assert rows["xla"].speedup_over_best == pytest.approx(50.5 / 125, rel=0.02)
    assert inductor.input_share == pytest.approx(1 - 1 / 1.1, rel=0.01)
    assert inductor.cost.price_per_epoch == pytest.approx(2.0 * 6400 / 125 / 3600, rel=0.01)


def test_engines_alike_show_no_difference(folder):
    """Ratios on both sides of 1, as of an engine against itself."""
    factors = iter((1.01, 0.99, 1.0, 1.02, 0.995))
    for number in range(1, 6):
        speed = 100 * fakes.DRIFT[number - 1] * next(factors)
        found = [
            fakes.window(r.first_step, speed) if isinstance(r, records.WindowRecord) else r
            for r in fakes.run("inductor", number)
        ]
        fakes.write_run(round_of(folder, number, "inductor"), found)
    row = row_of(folder, "inductor")
    assert row.verdict == "no difference shown"
    assert row.speedup_ci95[0] < 1 < row.speedup_ci95[1]


def test_a_difference_under_min_effect_does_not_count(tmp_path):
    folder = fakes.write(tmp_path, fakes.plan(min_effect=0.5))
    assert row_of(folder, "inductor").verdict == "no difference shown"


def test_two_rounds_that_agree_by_chance_show_nothing(tmp_path):
    """Their range lies above 1, and so does that of every fourth pair of an A/A trial."""
    folder = fakes.write(tmp_path, fakes.plan(repeats=2))
    for number, speed in ((1, 104.0), (2, 108.0)):
        found = [
            fakes.window(r.first_step, speed * fakes.DRIFT[number - 1])
            if isinstance(r, records.WindowRecord)
            else r
            for r in fakes.run("inductor", number)
        ]
        fakes.write_run(round_of(folder, number, "inductor"), found)
    row = row_of(folder, "inductor")
    assert row.verdict == "not valid"
    assert "spread between repeats too wide" in row.reasons[0]
    assert row.speedup == pytest.approx(1.06, rel=1e-3)
    assert row.speedup_ci95[0] < 1


def test_a_row_far_off_is_decided_after_two_rounds_and_the_page_tells_how(tmp_path):
    plan = fakes.plan(repeats=5, stops_when_decided=True, looks_for_far=True)
    folder = fakes.write(tmp_path, plan)
    for number in (3, 4, 5):
        shutil.rmtree(round_of(folder, number, "xla"))
    row = row_of(folder, "xla")
    assert (row.verdict, row.decided_after) == ("slower", 2)
    low, high = row.speedup_ci95
    assert high / low == pytest.approx(np.exp(2 * 3.72 * 0.13 / np.sqrt(2)), rel=1e-3)
    page = publish.render([comparison.read(folder)], "md")
    assert "xla: decided after 2 rounds, by an interval that takes for granted that rounds" in page
    # Comparisons of before went on for a third round.
    dataclasses.replace(plan, looks_for_far=False).write(folder)
    assert row_of(folder, "xla").decided_after is None


@pytest.mark.parametrize("rounds", [2, 3, 5, 10])
def test_an_interval_of_95_percent_covers_95_percent(rounds):
    random = np.random.default_rng(0)
    trials = np.exp(0.05 * random.normal(size=(4000, rounds)))
    intervals = [statistics.mean_with_interval(ratios)[1] for ratios in trials]
    covered = np.mean([low <= 1 <= high for low, high in intervals])
    assert covered == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


DEVICE = records.DeviceRecord


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        (records.EndRecord, {"num_recompiles": 3}, "compiled 3 graphs again after the warm-up"),
        (records.EndRecord, {"num_fallbacks": 7}, "7 operations left the compiler"),
        (records.EndRecord, {"num_graphs": 0.0}, "compiled nothing"),
        (records.WindowRecord, {"loss": None}, "loss became NaN"),
        (records.WindowRecord, {"data_wait_s": 0.3}, "loader-bound"),
        (DEVICE, {"throttled_share": 0.5}, "throttled"),
        (DEVICE, {"other_cpu_share": 0.5}, "machine was shared"),
        (DEVICE, {"other_device_processes": 1}, "device was shared"),
    ],
)
def test_planted_fault_makes_the_result_not_valid(folder, kind, values, reason):
    rewrite(folder, "inductor", replaced(kind, **values))
    row = row_of(folder, "inductor")
    assert row.verdict == "not valid"
    assert reason in row.reasons[0]
    assert "inductor" in row.reasons[0]
    assert row_of(folder, "xla").verdict == "slower"


def test_loader_bound_baseline_spoils_every_ratio(folder):
    rewrite(folder, "ddp", replaced(records.WindowRecord, data_wait_s=0.5))
    for name in ("inductor", "xla"):
        assert "loader-bound: ddp" in row_of(folder, name).reasons[0]


@pytest.mark.parametrize(
    ("workers", "share", "is_bound"), [(0, 0.2, False), (0, 0.3, True), (1, 0.2, True)]
)
def test_batches_between_steps_may_take_a_quarter_of_the_time(folder, workers, share, is_bound):
    """They take all rows the same time. Loading processes that are waited for hide the engine."""
    task = {"engine": "ddp", "device": "cpu", "workers": workers}
    of_run = replaced(records.RunRecord, task=task)
    of_window = replaced(records.WindowRecord, wall_s=1.0, data_wait_s=share)
    rewrite(folder, "ddp", lambda record: of_window(of_run(record)))
    reasons = row_of(folder, "inductor").reasons
    assert any("loader-bound: ddp" in reason for reason in reasons) is is_bound


def test_without_a_run_on_synthetic_data_the_wait_for_data_is_told(folder):
    with_such_runs = publish.render([comparison.read(folder)], "md")
    shutil.rmtree(folder / "synthetic")
    without = publish.render([comparison.read(folder)], "md")
    assert "input takes 9% of the time" in with_such_runs
    assert "waits for data" not in with_such_runs
    window = fakes.window(10, 100.0)
    assert f"ddp: waits for data {window.data_wait_s / window.wall_s:.0%} of the time" in without
    assert "input takes" not in without


def test_spread_too_wide(folder):
    for number, speed in enumerate((60, 140, 100, 80, 120), start=1):
        found = [
            fakes.window(r.first_step, speed) if isinstance(r, records.WindowRecord) else r
            for r in fakes.run("inductor", number)
        ]
        fakes.write_run(round_of(folder, number, "inductor"), found)
    row = row_of(folder, "inductor")
    assert row.verdict == "not valid"
    assert "spread between repeats too wide" in row.reasons[0]


def write_rounds(folder, engine: str, speeds: list[float]) -> None:
    """Rounds of constant speeds, and no more."""
    for number in range(1, fakes.plan().repeats + 1):
        at = round_of(folder, number, engine)
        shutil.rmtree(at)
        if number <= len(speeds):
            windows = [fakes.window(step, speeds[number - 1]) for step in (0, 10, 20, 30)]
            end = fakes.end(engine, cold=number == 1)
            fakes.write_run(at, [*fakes.run(engine, number)[:1], *windows, end])


def test_break_even_of_a_row_that_ended_early_on_a_machine_that_slows(folder):
    plan = fakes.plan(stops_when_decided=True, looks_for_far=True)
    plan.write(folder)
    write_rounds(folder, "ddp", [100, 100, 60, 60, 60])
    write_rounds(folder, "inductor", [150, 150])
    write_rounds(folder, "xla", [101, 99, 60, 61, 60])
    row = row_of(folder, "inductor")
    assert (row.verdict, row.decided_after) == ("faster", 2)
    # 26 seconds until the first step, and a third of 0.16 seconds saved in each.
    assert row.cost.break_even_steps == 488
    assert analysis.judge(comparison.read(folder)).best == "inductor"


def test_two_rounds_that_decide_nothing_are_said_to_be_too_few(folder):
    plan = fakes.plan(stops_when_decided=True, looks_for_far=True, max_minutes=1.0)
    plan.write(folder)
    for engine in fakes.SPEED:
        write_rounds(folder, engine, [100.0, 100.1])
    assert row_of(folder, "inductor").verdict == "not valid"
    (reason,) = row_of(folder, "inductor").reasons
    assert reason.startswith("2 rounds decide only what is far off")
    assert "scatter by 13%" in reason
    assert "--max_minutes 1" in publish.render([comparison.read(folder)], "md")


def distances(**changes: float) -> dict[str, float]:
    """Those of a step, of which some are others; names with blanks for underscores."""
    step = fakes.numerics("ddp", 2e-5)[3]
    assert isinstance(step, records.NumericsRecord)
    return {**step.distances, **{name.replace("_", " "): d for name, d in changes.items()}}


def test_numerics_drift_is_named_with_step_and_tensor(folder):
    drifted = fakes.numerics("inductor", 2e-5, distances=distances(gradient_of_w=0.06))
    fakes.write_run(folder / "numerics" / "inductor", drifted)
    row = row_of(folder, "inductor")
    assert row.verdict == "not valid"
    assert "different numerics: gradient of w at step 2" in row.reasons[0]
    assert row.numerics.verdict == "differs"
    assert (row.numerics.first_step, row.numerics.first_tensor) == (2, "gradient of w")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": -0.01}, "the gradient at step 2 is 0.9900 times"),
        ({"applied_steps": 1.0}, "applied steps off by 1"),
        ({"dropout_calls": 1.0}, "dropout calls off by 1"),
        ({"loss": 0.01}, "loss at step 2"),
        ({"update_of_w": 0.01}, "update of w at step 2"),
        ({"loss": 1e30}, "loss at step 2"),
    ],
)
def test_one_step_that_is_off_is_found(folder, change, reason):
    fakes.write_run(
        folder / "numerics" / "xla", fakes.numerics("xla", 2e-5, distances=distances(**change))
    )
    assert reason in row_of(folder, "xla").numerics.reason


def test_what_is_off_in_all_steps_is_found_sooner(folder):
    """A distance that would be nothing in one step."""
    fakes.write_run(folder / "numerics" / "xla", fakes.numerics("xla", 1e-3))
    found = row_of(folder, "xla").numerics
    assert found.verdict == "differs"
    found = row_of(folder, "inductor").numerics
    assert found.verdict == "trains the same"
    assert (found.num_steps, found.num_sharp_steps) == (3, 3)
    assert found.sensitivity_of_all < found.sensitivity < 0.02


def test_the_baselines_own_errors_are_no_noise(folder):
    """A baseline that is wrong is told so, and excuses nobody."""
    fakes.write_run(folder / "numerics" / "ddp", fakes.numerics("ddp", 0.5))
    rows = {name: row_of(folder, name) for name in fakes.SPEED}
    assert rows["ddp"].numerics.verdict == "differs"
    assert rows["ddp"].verdict == "not valid"
    assert rows["inductor"].numerics.verdict == "trains the same"
    assert rows["inductor"].verdict == "not valid"
    assert "ddp: different numerics" in rows["inductor"].reasons[0]
    fakes.write_run(folder / "numerics" / "xla", fakes.numerics("xla", 0.5))
    assert row_of(folder, "xla").numerics.verdict == "differs"


def write_floors(folder: Path, phase: str = "noise", step: int = 2, **drawn: float) -> None:
    """Plain ddp's passes with draws: `drawn` in one step, 1e-4 in the others."""
    at_rest = dict.fromkeys(distances(**drawn), 1e-4)
    named = {name.replace("_", " "): distance for name, distance in drawn.items()}
    for name in comparison.FLOORS:
        found = fakes.numerics("ddp", 1e-5)
        drawn_at = [
            records.NumericsRecord("noise", n, at_rest) for n in (1, 2, 3) for _ in range(2)
        ]
        drawn_at += [records.NumericsRecord(phase, step, {**at_rest, **named})]
        fakes.write_run(folder / "numerics" / name, [*found[:-1], *drawn_at, found[-1]])


@pytest.mark.parametrize(
    ("off", "drawn_at", "verdict"),
    [
        ({"gradient_of_w": 0.06}, None, "differs"),
        ({"gradient_of_w": 0.06}, 2, "trains the same"),
        ({"gradient_of_w": 0.06}, 3, "trains the same"),  # a jump may come in any step
        ({"gradient_of_w": 0.2}, 3, "differs"),
        ({"gradient": 0.06}, 2, "trains the same"),
        ({"gradient": 0.06}, 3, "differs"),
        ({"loss": 1e-3}, 2, "trains the same"),
        ({"loss": 1e-3}, 3, "differs"),
        ({"update_of_w": 0.01}, 2, "differs"),  # which rounding in the network has no part in
        ({"applied_steps": 1.0}, 2, "differs"),
    ],
)  # fmt: skip
def test_what_rounding_may_do_in_a_step_is_no_difference(folder, off, drawn_at, verdict):
    if drawn_at:
        write_floors(folder, step=drawn_at, gradient_of_w=0.07, gradient=0.07, loss=2e-3)
    rounded = fakes.numerics("xla", 1e-5, distances=distances(**off))
    fakes.write_run(folder / "numerics" / "xla", rounded)
    found = row_of(folder, "xla").numerics
    assert (found.verdict, found.num_sharp_steps) == (verdict, 3), found


def test_a_step_in_which_rounding_does_much_is_no_test(folder):
    write_floors(folder, scale=0.3)
    found = row_of(folder, "xla").numerics
    assert found.verdict == "not checked"
    assert found.reason == "too noisy at step 2 (2 of 3 were sharp tests)"
    wrong = fakes.numerics("xla", 2e-5, distances=distances(scale=-0.9))
    fakes.write_run(folder / "numerics" / "xla", wrong)
    assert row_of(folder, "xla").numerics.verdict == "differs"


@pytest.mark.parametrize(("drawn", "verdict"), [(None, "differs"), (0.1, "trains the same")])
@pytest.mark.parametrize(
    ("phase", "step", "name", "off"),
    [("evaluation", 3, "loss", 0.01), ("free", 2, "loss", 0.01),
     ("free end", 3, "parameters", 0.15), ("free end", 3, "way", -0.1)],
)  # fmt: skip
def test_what_rounding_may_do_beside_the_steps_is_no_difference(
    folder, phase, step, name, off, drawn, verdict
):
    if drawn:
        write_floors(folder, f"noise of {phase}", step, **{name: drawn})
    found = [
        dataclasses.replace(r, distances={**r.distances, name: off})
        if isinstance(r, records.NumericsRecord) and (r.phase, r.step) == (phase, step)
        else r
        for r in fakes.numerics("xla", 1e-5)
    ]
    fakes.write_run(folder / "numerics" / "xla", found)
    assert row_of(folder, "xla").numerics.verdict == verdict


def test_steps_that_are_too_noisy_are_no_test(folder):
    noisy = distances(scale=0.08, gradient_of_w=0.3)
    for name in comparison.FLOORS:
        fakes.write_run(folder / "numerics" / name, fakes.numerics("ddp", 1e-5, distances=noisy))
    found = row_of(folder, "xla").numerics
    assert found.verdict == "not checked"
    assert found.reason == "too noisy at step 2 (2 of 3 were sharp tests)"
    told = publish.render([comparison.read(folder, allow_mixed=True)], "md")
    assert told.count("make a sharp test") == 1
    fakes.write_run(
        folder / "numerics" / "xla", fakes.numerics("xla", 2e-5, distances=distances(scale=-0.9))
    )
    assert row_of(folder, "xla").numerics.verdict == "differs"


def test_random_numbers_of_the_models_own_are_not_checked(folder):
    made = fakes.reference(note="the model draws random numbers")
    fakes.write_run(folder / "numerics" / comparison.REFERENCE, made)
    row = row_of(folder, "xla")
    assert row.numerics.verdict == "not checked"
    assert "draws random numbers" in row.numerics.reason
    assert row.verdict == "slower"


def test_ranks_apart_mean_gradients_not_averaged(folder):
    fakes.write_run(folder / "numerics" / "xla", fakes.numerics("xla", 2e-5, ranks_apart=3))
    assert "not averaged" in row_of(folder, "xla").numerics.reason


@pytest.mark.parametrize("status", ["oom", "error", None])
def test_numerics_pass_that_crashed_makes_the_result_not_valid(folder, status):
    """None: killed together with its launcher."""
    ended = [records.EndRecord(status, "no memory left")] if status else []
    fakes.write_run(folder / "numerics" / "xla", [fakes.header("xla"), *ended])
    row = row_of(folder, "xla")
    assert row.verdict == "not valid"
    assert (row.numerics.verdict, row.numerics.crashed) == ("not checked", True)
    why = "no memory left" if status else "killed"
    assert why in row.reasons[0]
    for format in ("table", "md", "html", "json"):
        rendered = publish.render([comparison.read(folder)], format)
        assert f"(numerics not checked: its pass did not end ({status or why}" in rendered
    assert row_of(folder, "inductor").verdict == "faster"


def test_numerics_that_nobody_asked_for_or_has_not_run_are_not_checked(folder, tmp_path):
    for path in (folder / "numerics" / "xla").iterdir():
        path.unlink()
    asked = row_of(folder, "xla")
    spared = row_of(fakes.write(tmp_path / "spared", fakes.plan(numerics_steps=0)), "xla")
    for row in (asked, spared):
        assert row.verdict == "slower"
        assert (row.numerics.verdict, row.numerics.crashed) == ("not checked", False)


def with_losses(folder: Path, num_rounds: int, change) -> analysis.RowResult:
    """inductor's row where `change(first_step, loss)` is what its windows recorded."""
    for number in range(1, num_rounds + 1):
        found = [
            dataclasses.replace(r, mean_loss=change(r.first_step, r.mean_loss))
            if isinstance(r, records.WindowRecord)
            else r
            for r in fakes.run("inductor", number)
        ]
        fakes.write_run(round_of(folder, number, "inductor"), found)
    return row_of(folder, "inductor")


LOSSES = {
    "does not learn": lambda step, loss: loss + step / 50,
    "learns half as much": lambda step, loss: loss + step / 100,
    "learns half as much again": lambda step, loss: loss - step / 100,
    "a little off": lambda step, loss: loss + 0.05,
}


@pytest.mark.parametrize("fault", LOSSES)
def test_losses_that_part_from_the_baseline_make_the_result_not_valid(folder, fault):
    row = with_losses(folder, 5, LOSSES[fault])
    assert row.verdict == "not valid"
    assert "inductor: losses part from the baseline's: " in row.reasons[0]
    assert "in steps 30 to 40 where ddp has 1.4 (seeds spread by 0.0" in row.reasons[0]
    assert row_of(folder, "xla").verdict == "slower"
    for format in ("table", "md", "html", "json"):
        rendered = publish.render([comparison.read(folder)], format)
        assert "losses part from the baseline" in rendered


@pytest.mark.parametrize("rounds", [2, 3])
def test_what_does_not_learn_is_seen_in_few_rounds(tmp_path, rounds):
    folder = fakes.write(tmp_path, fakes.plan(repeats=rounds))
    assert "losses part" in with_losses(folder, rounds, LOSSES["does not learn"]).reasons[0]
    assert row_of(folder, "xla").verdict == "slower"


@pytest.mark.parametrize("rounds", [2, 3])
def test_what_is_far_off_is_seen_however_it_scatters(rounds):
    """What memory that nothing was written to gave for a loss, of 2.3 in all windows."""
    baseline = 2.3 + 0.1 * np.random.default_rng(0).normal(size=(rounds, 8))
    row = baseline + np.array([3e35, 2e27, 5e30])[:rounds, None]
    assert losses.losses_diverge(row, baseline)
    row[0] = baseline[0]  # a round in which it was not so is no proof
    assert not losses.losses_diverge(row, baseline)


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_as_far_apart_as_rounding_puts_them_are_the_same(folder, sign):
    """Sure, for it is the same in each round, and smaller than what seeds do."""
    row = with_losses(folder, 5, lambda step, loss: loss + sign * 1e-5 * step)
    assert row.verdict == "faster"


def test_losses_that_cannot_be_compared_are_not(folder):
    """Rounds of one seed, as before each had its own, have no spread to measure by."""
    for engine in fakes.SPEED:
        for number in range(1, 6):
            head, *rest = fakes.run(engine, number)
            head = dataclasses.replace(head, task={**head.task, "seed": 0})
            fakes.write_run(round_of(folder, number, engine), [head, *rest])
    row = row_of(folder, "inductor")
    assert row.verdict == "faster"


def test_right_engines_losses_do_not_part():
    """As far apart as two seeds are, which is further than rounding can put them."""
    random = np.random.default_rng(0)
    for rounds in (3, 5):
        runs = random.normal(size=(2, 2000, rounds, 8)) + 3 * np.exp(-np.arange(8) / 2)
        told = [losses.losses_diverge(*pair) for pair in runs.swapaxes(0, 1)]
        assert sum(told) <= 6  # one in 1,000, with room for chance


def test_engine_that_failed_is_a_row_with_its_reason(folder):
    for number in range(1, 6):
        fakes.write_run(
            round_of(folder, number, "xla"),
            [fakes.header("xla"), records.EndRecord("oom", "rank 0 failed: OutOfMemoryError")],
        )
    row = row_of(folder, "xla")
    assert (row.verdict, row.reasons) == ("failed", ("rank 0 failed: OutOfMemoryError",))
    assert row_of(folder, "inductor").verdict == "faster"
    assert "OutOfMemoryError" in publish.render([comparison.read(folder)], "md")


@pytest.mark.parametrize("status", ["oom", "error", "interrupted", None])
@pytest.mark.parametrize("engine", ["inductor", "ddp"])
def test_round_that_failed_makes_the_result_not_valid(folder, engine, status):
    """The others are not asked whether they would do without it; likewise the baseline's."""
    path = round_of(folder, 3, engine) / "records.jsonl"
    if status is None:  # killed in mid line
        path.write_bytes(path.read_bytes()[:-300])
    else:
        ended = records.EndRecord(status, "CUDA out of memory")
        fakes.write_run(path.parent, [*fakes.run(engine, 3)[:3], ended])
    row = row_of(folder, "inductor")
    assert row.verdict == "not valid"
    why = f"({status}): CUDA out of memory" if status else "(killed): it was killed"
    assert row.reasons[0] == f"round 3 of {engine} failed {why}"
    assert row_of(folder, engine).rounds_ok == 2  # none is made after it
    assert row_of(folder, engine).samples_per_s_rounds[2] is None
    assert row_of(folder, "xla").verdict == ("not valid" if engine == "ddp" else "slower")
    for format in ("table", "md", "html", "json"):
        rendered = publish.render([comparison.read(folder)], format)
        assert f"round 3 of {engine} failed" in rendered


def test_comparison_that_has_not_ended_says_so(folder):
    for number in (4, 5):
        (round_of(folder, number, "inductor") / "records.jsonl").unlink()
    row = row_of(folder, "inductor")
    assert (row.verdict, row.rounds_ok) == ("not valid", 3)
    assert row.reasons == ("2 of 5 rounds of inductor have not run",)


def test_runs_of_different_settings_are_refused_or_marked(folder):
    rewrite(folder, "xla", replaced(records.RunRecord, hostname="elsewhere"))
    with pytest.raises(RequestError, match="machine: elsewhere, here.*--allow_mixed"):
        comparison.read(folder)
    found = comparison.read(folder, allow_mixed=True)
    assert "mixed: machine: elsewhere, here" in publish.render([found], "html")
    assert "MIXED machine" in publish.render([found], "md")
    assert row_of(folder, "xla").verdict == "not valid"


def test_runs_of_different_launchers_are_refused(folder):
    rewrite(folder, "xla", replaced(records.RunRecord, task={"launcher": "dask"}))
    with pytest.raises(RequestError, match="launcher: None, dask.*--allow_mixed"):
        comparison.read(folder)


def test_page_is_one_file_and_escapes(tmp_path):
    evil = '<script>alert("x")</script>&'
    rows = tuple(
        dataclasses.replace(row, name=row.name + evil) if row.name == "xla" else row
        for row in fakes.plan().rows
    )
    folder = fakes.write(tmp_path / "fake", fakes.plan(rows=rows))
    for engine in fakes.SPEED:
        rewrite(
            folder,
            engine,
            replaced(records.RunRecord, device_name=evil, model=evil, versions={evil: evil}),
        )
    page = publish.render([comparison.read(folder)], "html")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert page.index("is <b") < page.index("<svg")  # the verdict comes first


def test_report_shows_the_good_and_names_the_bad(folder, tmp_path, capsys):
    bad = {"empty": "", "foreign": '{"kind": "other"}\n[1, 2]\nnot json\n', "cut": '{"kind": "ru'}
    paths = []
    for name, text in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(text)
        paths.append(str(tmp_path / name))
    good = str(round_of(folder, 2, "ddp"))
    missing = str(tmp_path / "missing")
    assert cli.main(["report", good, str(folder), *paths, missing]) == 2
    out, err = capsys.readouterr()
    assert "inductor is faster" in out
    assert len(err.splitlines()) == 4
    for path in [*paths, missing]:
        assert path in err


def test_single_runs_make_a_page_without_a_verdict(folder, capsys):
    runs = [str(round_of(folder, 2, name)) for name in ("ddp", "xla")]
    assert cli.main(["report", *runs, "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert "<svg" in page
    assert "fewer than two rounds" in page


def test_page_of_one_run_shows_its_curves_and_compares_nothing(folder, capsys):
    run_dir = round_of(folder, 1, "ddp")
    for epoch in range(3):
        for averaged in (False, True):
            scores = records.EvalRecord(epoch, 1.5, 0.5, 0.9, 64, averaged=averaged)
            records.append(run_dir / "records.jsonl", scores)
    assert cli.main(["report", str(run_dir), "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert "Top-1 over the whole validation set" in page
    assert "averaged weights" in page
    assert "Speedup" not in page
    assert "break-even</h2>" not in page


def test_figures_for_a_notebook(folder):
    from accbench import report

    figures = report.figures(folder)
    assert len(figures) == 2
    labels = [text.get_text() for text in figures[0].axes[0].get_yticklabels()]
    assert labels == ["ddp", "inductor", "xla"]


def test_a_terminals_table_cuts_no_number_and_no_name(tmp_path):
    """Variants of one engine, at millions of samples a second."""
    names = {"inductor": "inductor max-autotune-no-cudagraphs, a batch of the largest size"}
    names["xla"] = names["inductor"] + ", other"
    rows = tuple(
        dataclasses.replace(row, name=names.get(row.name, row.name)) for row in fakes.plan().rows
    )
    folder = fakes.write(tmp_path / "fake", fakes.plan(rows=rows))
    for engine in fakes.SPEED:
        rewrite(folder, engine, lambda record: (
            dataclasses.replace(record, num_samples=record.num_samples * 10**6)
            if isinstance(record, records.WindowRecord) else record
        ))  # fmt: skip
    found = comparison.read(folder)
    drawn, _, notes = publish.render([found], "table").partition("batch of the largest size:")
    assert notes
    assert "…" not in drawn
    result = analysis.judge(found)
    for title, cell in comparison_table.columns(result).items():
        for row in result.rows:
            whole = cell(row).split() if title in comparison_table.LEFT else [cell(row)]
            assert all(text in drawn for text in whole)
    assert max(map(len, drawn.splitlines()[1:8])) <= 164  # titles and names are folded before


def test_a_terminals_table_of_runs_cuts_no_number_and_no_name():
    row = dataclasses.replace(
        summary.summarize_records("r", fakes.run("ddp", 1)), engine="e" * 30, status="interrupted",
        samples_per_s=12_345_678.9, step_ms=123_456.7, tflop_per_s=987.0, peak_share=0.5,
        time_to_first_step_s=12_345.6, compile_s=12_345.6, last_loss=123_456.789,
        peak_memory_bytes=2**50, warmup_peak_memory_bytes=2**51,
    )  # fmt: skip
    variant = dataclasses.replace(row, engine="e" * 30 + "2", samples_per_s=2.0)
    for rows in ([row, variant], [dataclasses.replace(row, engine="e" * 90), variant]):
        drawn = table.render(rows, "table")
        for cell in table.columns(rows).values():
            assert all(cell(each, rows[0]) in drawn for each in rows)
    usual = dataclasses.replace(
        summary.summarize_records("r", fakes.run("ddp", 1)), samples_per_s=12_456.7,
        tflop_per_s=9.87, peak_share=0.5, warmup_peak_memory_bytes=2**40,
    )  # fmt: skip
    head, cells, _ = table.render([usual], "table").partition("12,456.7")
    assert cells
    assert "warm-up" in head
    assert max(map(len, head.splitlines())) <= 120  # titles are folded before


def of_text(record):
    """Records of a model that counts tokens, 64 a sample, and has no accuracy."""
    if isinstance(record, records.RunRecord):
        return dataclasses.replace(record, unit="tokens", units_per_sample=64)
    return record


def test_speeds_are_told_in_what_the_model_counts(folder):
    for engine in fakes.SPEED:
        rewrite(folder, engine, of_text)
    scores = records.EvalRecord(0, 1.5, None, None, 64)
    records.append(round_of(folder, 1, "ddp") / "records.jsonl", scores)
    found = comparison.read(folder)
    table = publish.render([found], "md")
    assert "| engine | tokens/s | speedup" in table
    assert "| ddp | 6,400.0 | 1 |" in table
    assert "tokens a sample 64" in table
    assert "samples/s" not in table
    assert "image size" not in table
    page = publish.render([found], "html")
    assert "tokens/s" in page
    assert "samples/s" not in page
    assert "Loss over the whole validation set" in page
    # JSON is of samples as ever, and fits its schema.
    values = json.loads(publish.render([found], "json"))
    jsonschema.validate(values, json.loads(SCHEMA.read_text()))
    assert values["rows"][0]["samples_per_s"] == pytest.approx(100)


def test_texts_of_different_lengths_do_not_belong_side_by_side(folder):
    rewrite(folder, "ddp", of_text)
    with pytest.raises(RequestError, match="tokens a sample: 64, None"):
        comparison.read(folder)
