"""A comparison on disk: a plan, and a run's folder for every (round, row)."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.errors import RequestError
from accbench.report import run as runs
from accbench.report import sequential
from accbench.report.disturbance import RepeatRule
from accbench.report.run import RecordedRun
from accbench.report.sequential import RowEnd
from accbench.report.statistics import interquartile_mean_ratio

PLAN_FILE = "comparison.json"
SCHEMA_VERSION = 2
# What a run may be without having failed.
_UNDECIDED = ("ok", "not run")
FEWEST_ROUNDS = 2
"""Rounds that `max_minutes` leaves in any case: without them there is no verdict."""
REFERENCE = "float64-reference"
# Passes of plain ddp that give the noise: in its default memory layout, and in the other one.
FLOORS = ("plain-ddp", "plain-ddp-other-layout")
# What the folder of a floor's repeated free runs adds to the floor's name.
FREE_DRAWS = "-free-draws"


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """One row of a comparison: an engine or a variant of one, and the run that measures it."""

    name: str
    """As the person wrote it: `ddp:channels_last=false`."""
    folder: str
    task: dict[str, Any] | None
    """Flag -> value; None where the engine cannot run here."""
    reason: str | None = None
    """Why the engine cannot run here."""


@dataclasses.dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison measures, and the settings that it is judged by."""

    rows: tuple[RowPlan, ...]
    baseline: str
    repeats: int
    min_effect: float
    numerics_steps: int
    input_round: bool
    """One more run a row on synthetic data."""
    price_per_hour: float | None = None
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that `compare` chose because nobody gave them."""
    order_seed: int | None = None
    """Seed of the rows' order within the rounds, see `accbench.comparing.order`.

    None: not drawn yet, or a comparison of an older version, whose rounds kept the rows' order."""
    stops_when_decided: bool = False
    """Look after each round, and measure a row that is decided no further. False in comparisons of
    before, whose rows all have `repeats` rounds."""
    looks_for_far: bool = False
    """Look after two rounds, too, at rows that are far from the baseline. False in comparisons of
    before."""
    takes_medians: bool = False
    """Judge a run by the median of its windows. False in comparisons of before, which are judged by
    the mean."""
    repeat_rule: RepeatRule | None = None
    """When a disturbed run is measured again; None: never."""
    max_repeats: int | None = None
    """Rounds of a row whose interval stays too wide for a verdict; None: `repeats`."""
    max_minutes: float | None = None
    """Begin no round that would end later, beyond the second; None: no limit."""
    quick: bool = False
    """A first verdict, of few steps in little time."""
    alternates_windows: bool = False
    """The rows' runs of a round are alive at once and train their windows in turn, so that the
    ratio of a round is that of windows next to each other in time. False in comparisons of before,
    and where runs follow each other."""
    usual_scatter: float | None = None
    """Standard deviation of the logarithm of a round's ratio as it usually is, which intervals of
    undisturbed rounds lean on; None: they follow from these rounds alone."""
    input_round_of_baseline: bool = False
    """The baseline alone has a run on synthetic data."""
    reuses_reference: bool = False
    """Take float64's and plain ddp's passes from an earlier comparison, and keep them for later."""
    schema_version: int = SCHEMA_VERSION

    @property
    def most_rounds(self) -> int:
        """The rounds that no row goes beyond."""
        return self.repeats if self.max_repeats is None else self.max_repeats

    def judged_speed(self, run: RecordedRun) -> float | None:
        """Return the samples/s that ratios are made of; None unless the run ended well."""
        if run.status != "ok":
            return None
        return run.median_samples_per_s if self.takes_medians else run.samples_per_s

    def write(self, folder: Path) -> None:
        """Write the plan into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / PLAN_FILE).write_text(text + "\n")

    @staticmethod
    def read(folder: Path) -> "ComparisonPlan":
        """Read the plan from `folder`.

        Raises:
            RequestError: there is no plan, or the file is not one.
        """
        file = folder / PLAN_FILE
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            rows = tuple(RowPlan(**row) for row in values.pop("rows"))
            rule = values.pop("repeat_rule", None)
            return ComparisonPlan(
                rows=rows, repeat_rule=None if rule is None else RepeatRule(**rule), **values
            )
        except OSError as error:
            raise RequestError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RequestError(f"{file} is not a comparison of this version of accbench") from None


@dataclasses.dataclass(frozen=True)
class SetAsideRun:
    """A disturbed run of a round that was measured again."""

    number: int
    """The round, from 1."""
    run: RecordedRun


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """All runs of one row."""

    name: str
    rounds: tuple[RecordedRun, ...]
    synthetic: RecordedRun = dataclasses.field(default_factory=lambda: RecordedRun("synthetic"))
    numerics: RecordedRun = dataclasses.field(default_factory=lambda: RecordedRun("numerics"))
    reason: str | None = None
    set_aside: tuple[SetAsideRun, ...] = ()

    @property
    def good(self) -> tuple[RecordedRun, ...]:
        """The rounds that ended well and have a speed."""
        return tuple(run for run in self.rounds if run.status == "ok" and run.samples_per_s)

    @property
    def failure(self) -> str | None:
        """The reason why the row has no speed; None if it has one."""
        if self.good:
            return None
        if self.reason:
            return self.reason
        for run in self.rounds:
            if run.end is not None and run.end.error:
                return run.end.error
            if run.status == "ok":
                return "no steps after the warm-up; raise --max_steps"
        return "it did not run to its end"

    def median(self, name: str) -> float | None:
        """Return the median over the good rounds of a property of `Run`."""
        values = [getattr(run, name) for run in self.good]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A plan and its runs' results."""

    name: str
    plan: ComparisonPlan
    rows: tuple[ComparisonRow, ...]
    reference: RecordedRun = dataclasses.field(default_factory=lambda: RecordedRun(REFERENCE))
    floors: tuple[RecordedRun, ...] = ()
    """Numerics passes of plain ddp."""
    mixed: tuple[str, ...] = ()
    """The settings in which the runs differ, one line each; empty where all are the same."""

    @property
    def baseline(self) -> ComparisonRow:
        """The row that the others are compared with."""
        return next(row for row in self.rows if row.name == self.plan.baseline)


def counted(comparison: Comparison) -> tuple[str, int]:
    """Return the unit that its reports tell speeds in, and units a sample."""
    return runs.counted(run for row in comparison.rows for run in row.rounds)


def round_folder(folder: Path, number: int, row: RowPlan) -> Path:
    """Return the folder of a round's run; rounds count from 1."""
    return folder / "rounds" / f"{number:02}" / row.folder


def set_aside_folder(folder: Path, number: int, row: RowPlan) -> Path:
    """Return where a disturbed run of a round is kept once it is measured again."""
    return folder / "set_aside" / f"{number:02}" / row.folder


def synthetic_folder(folder: Path, row: RowPlan) -> Path:
    """Return the folder of the run on synthetic data."""
    return folder / "synthetic" / row.folder


def numerics_folder(folder: Path, name: str) -> Path:
    """Return the folder of a numerics pass, by a row's folder name or a reference's."""
    return folder / "numerics" / name


def free_draws_folder(floor: Path) -> Path:
    """Return the folder of the repeated free runs of a pass of plain ddp, which few rows need."""
    return floor.with_name(f"{floor.name}{FREE_DRAWS}")


def _read_floor(folder: Path) -> RecordedRun:
    floor = runs.read_if_there(folder)
    draws = runs.read_if_there(free_draws_folder(folder))
    end = floor.end if draws.status in _UNDECIDED else draws.end
    return dataclasses.replace(floor, numerics=(*floor.numerics, *draws.numerics), end=end)


def read(folder: Path, allow_mixed: bool = False) -> Comparison:
    """Read a comparison and all its runs.

    Raises:
        RequestError: there is no comparison, or its runs cannot be compared.
    """
    return of_plan(ComparisonPlan.read(folder), folder, allow_mixed)


def of_plan(plan: ComparisonPlan, folder: Path, allow_mixed: bool = False) -> Comparison:
    """Read all runs of a plan in `folder`.

    Raises:
        RequestError: the runs cannot be compared.
    """
    rows = read_rows(plan, folder)
    mixed = check_mixed([run for row in rows for run in row.rounds], allow_mixed)
    return Comparison(
        folder.name, plan, rows,
        reference=runs.read_if_there(numerics_folder(folder, REFERENCE)),
        floors=tuple(_read_floor(numerics_folder(folder, name)) for name in FLOORS),
        mixed=mixed,
    )  # fmt: skip


def read_rows(plan: ComparisonPlan, folder: Path) -> tuple[ComparisonRow, ...]:
    """Read all runs of all rows; of a row that was decided early, the rounds until then."""
    rows = tuple(
        ComparisonRow(
            name=row.name,
            rounds=tuple(
                runs.read_if_there(round_folder(folder, number, row))
                for number in range(1, plan.most_rounds + 1)
            ),
            synthetic=runs.read_if_there(synthetic_folder(folder, row)),
            numerics=runs.read_if_there(numerics_folder(folder, row.folder)),
            reason=row.reason,
            set_aside=_read_set_aside(plan, folder, row),
        )
        for row in plan.rows
    )
    needed = rounds_needed(plan, rows)
    return tuple(dataclasses.replace(row, rounds=row.rounds[: needed[row.name]]) for row in rows)


def _read_set_aside(plan: ComparisonPlan, folder: Path, row: RowPlan) -> tuple[SetAsideRun, ...]:
    runs_by_round = {
        number: runs.read_if_there(set_aside_folder(folder, number, row))
        for number in range(1, plan.most_rounds + 1)
    }
    return tuple(SetAsideRun(n, run) for n, run in runs_by_round.items() if run.header)


def rounds_needed(plan: ComparisonPlan, rows: Sequence[ComparisonRow]) -> dict[str, int]:
    """Return how many rounds each row is measured in, as far as its runs tell by now.

    The baseline goes on as long as any other row does, and no row beyond a baseline that failed.
    """
    baseline = next(row for row in rows if row.name == plan.baseline)
    limit = rounds_in_time(plan, rows)
    if (failed := _first_failed_round(baseline)) is not None:
        limit = min(limit, failed)
    needed = {
        row.name: min(_rounds_until_ended(plan, row, baseline), limit)
        for row in rows
        if row is not baseline
    }
    return needed | {baseline.name: max(needed.values(), default=plan.repeats)}


def is_cut_short(plan: ComparisonPlan, rows: Sequence[ComparisonRow], number: int) -> bool:
    """Return whether `max_minutes` ends the rounds after round `number`, and a row needs more."""
    baseline = next(row for row in rows if row.name == plan.baseline)
    needed = [_rounds_until_ended(plan, row, baseline) for row in rows if row is not baseline]
    return rounds_in_time(plan, rows) == number < max(needed, default=0)


def rounds_in_time(plan: ComparisonPlan, rows: Sequence[ComparisonRow]) -> int:
    """Return the rounds that `max_minutes` leaves, as far as the runs tell by now.

    A round is expected to take as long as the one before it. Two are made in any case: without them
    there is no verdict.
    """
    if plan.max_minutes is None:
        return plan.most_rounds
    elapsed_s = 0.0
    for number in range(1, plan.most_rounds):
        round_runs = [row.rounds[number - 1] for row in rows if len(row.rounds) >= number]
        round_runs += [a.run for row in rows for a in row.set_aside if a.number == number]
        round_s = sum(run.duration_s for run in round_runs)
        elapsed_s += round_s
        if number >= FEWEST_ROUNDS and elapsed_s + round_s > 60 * plan.max_minutes:
            return number
    return plan.most_rounds


def round_ratios(
    plan: ComparisonPlan, row: ComparisonRow, other: ComparisonRow
) -> list[float | None]:
    """Return the ratios of two rows' speeds by round; None unless both runs ended well."""
    if plan.alternates_windows and plan.takes_medians:
        pairs = zip(row.rounds, other.rounds, strict=False)
        return [_ratio_of_windows(a, b) for a, b in pairs]
    speeds = [
        (plan.judged_speed(a), plan.judged_speed(b))
        for a, b in zip(row.rounds, other.rounds, strict=False)
    ]
    return [a / b if a and b else None for a, b in speeds]


def _ratio_of_windows(run: RecordedRun, other: RecordedRun) -> float | None:
    """Return the interquartile mean of the ratios of windows that begin at the same step."""
    if run.status != "ok" or other.status != "ok":
        return None
    speeds, other_speeds = run.speed_of_windows, other.speed_of_windows
    both = [step for step in speeds if step in other_speeds]
    if not both:
        return None
    return interquartile_mean_ratio(speeds[step] / other_speeds[step] for step in both)


def _first_failed_round(row: ComparisonRow) -> int | None:
    return next((n for n, run in enumerate(row.rounds, 1) if run.status not in _UNDECIDED), None)


def _rounds_until_ended(plan: ComparisonPlan, row: ComparisonRow, baseline: ComparisonRow) -> int:
    failed = _first_failed_round(row)
    if row.reason is not None or failed is not None:  # it is measured no further
        return failed or 0
    return find_end(plan, row, baseline).num_rounds


def find_end(plan: ComparisonPlan, row: ComparisonRow, baseline: ComparisonRow) -> RowEnd:
    """Return how many rounds a row needs, and whether a look decides it; see `sequential`."""
    if not plan.stops_when_decided or row is baseline:
        return RowEnd(plan.repeats, False)
    ratios = round_ratios(plan, row, baseline)
    return sequential.find_end(
        ratios, plan.repeats, plan.most_rounds, plan.min_effect, plan.looks_for_far
    )


def check_mixed(run_list: list[RecordedRun], allow_mixed: bool) -> tuple[str, ...]:
    """Return the settings in which the runs differ, one line each.

    Raises:
        RequestError: they differ and `allow_mixed` is off.
    """
    settings = [run.setting() for run in run_list if run.header is not None]
    lines = []
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = sorted({str(setting.get(key)) for setting in settings})
        if len(values) > 1:
            lines.append(f"{key}: {', '.join(values)}")
    if lines and not allow_mixed:
        raise RequestError(
            f"these runs have different settings and cannot be compared ({'; '.join(lines)}); "
            "to show them together anyway, pass --allow_mixed"
        )
    return tuple(lines)
