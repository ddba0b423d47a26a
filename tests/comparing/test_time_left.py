"""How long a comparison goes on, by made-up runs of 20 s each."""

import dataclasses
import shutil

import pytest

from accbench.comparing import jobs, plan, time_left
from accbench.report import comparison
from tests.report import fakes


def test_what_has_run_takes_no_more_time_and_what_has_not_takes_as_long_as_before(tmp_path):
    planned = fakes.plan(numerics_steps=0)
    names = [row.name for row in planned.rows]
    folder = fakes.write(tmp_path, planned)
    assert time_left.estimate_s(planned, folder, names) == 0
    for number in (4, 5):
        shutil.rmtree(folder / "rounds" / f"{number:02}")
    shutil.rmtree(comparison.synthetic_folder(folder, planned.rows[0]))
    assert time_left.estimate_s(planned, folder, names) == 2 * 3 * 20 + 20
    assert time_left.estimate_s(planned, folder, names[1:]) == 2 * 3 * 20
    for number in (2, 3):
        shutil.rmtree(folder / "rounds" / f"{number:02}")
    # Inductor compiles for 25 s of its first round, and xla for 35 s: more than these runs took.
    assert time_left.estimate_s(planned, folder, names[1:]) == 4 * 20
    shutil.rmtree(folder / "rounds" / "01")
    assert time_left.estimate_s(planned, folder, names) is None


def test_a_numerics_pass_is_guessed_from_the_start_and_the_speed_of_a_step(tmp_path):
    planned = fakes.plan()
    names = [row.name for row in planned.rows]
    folder = fakes.write(tmp_path, planned)
    assert time_left.estimate_s(planned, folder, names) == 0
    shutil.rmtree(comparison.numerics_folder(folder, "xla"))
    # Three steps of a third of a second, six times, and 40 s to the first.
    assert time_left.estimate_s(planned, folder, names) == pytest.approx(
        40 + 6 * 3 * 0.32, rel=0.05
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "about 1 s"), (42, "about 42 s"), (268, "about 4 min 30 s"), (299, "about 5 min")],
)
def test_durations_in_words(seconds, words):
    assert time_left.in_words(seconds) == words


@pytest.mark.parametrize(
    ("flags", "data", "rows"),
    [(["--workers=1"], "imagefolder:/images", {"ddp"}), (["--workers=1"], "synthetic", set()),
     ([], "imagefolder:/images", set()),  # batches are made between steps, and timed there
     (["--workers=1", "--no-input_round"], "imagefolder:/images", set()),
     (["--workers=1", "--quick"], "imagefolder:/images", set())],
)  # fmt: skip
def test_on_a_cpu_the_baseline_alone_trains_without_input(flags, data, rows):
    argv = ["--engines=ddp,ddp", "--device=cpu", "--data=synthetic", *flags]
    parsed = plan.parse(argv, "accbench compare").plan
    of_data = tuple(
        dataclasses.replace(row, task={**row.task, "data": data}) for row in parsed.rows
    )
    assert jobs.rows_with_input_round(dataclasses.replace(parsed, rows=of_data)) == rows


def test_elsewhere_every_row_trains_without_input(tmp_path):
    of_old = fakes.plan()
    assert jobs.rows_with_input_round(of_old) == {row.name for row in of_old.rows}
