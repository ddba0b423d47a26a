"""A comparison as it lies on disk: a plan, and a run's folder for every (round, row)."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from accbench.errors import RequestError
from accbench.report import run as runs
from accbench.report.run import Run

PLAN_FILE = "comparison.json"
SCHEMA_VERSION = 2
REFERENCE = "float64-reference"
# Passes of plain ddp, from which the noise is known: as it is, and in the other memory layout.
FLOORS = ("plain-ddp", "plain-ddp-other-layout")


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """An engine, or a variant of one, and the run that measures it."""

    name: str
    """As the person wrote it: `ddp:channels_last=false`."""
    folder: str
    task: dict[str, Any] | None
    """Flag -> value; None where the engine cannot run here."""
    reason: str | None = None
    """Why it cannot."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a comparison measures, and by what it judges."""

    rows: tuple[RowPlan, ...]
    baseline: str
    repeats: int
    min_effect: float
    numerics_steps: int
    input_round: bool
    price_per_hour: float | None = None
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that `compare` chose because nobody gave them."""
    order_seed: int | None = None
    """Of the rows' order within the rounds, see `accbench.comparing.order`; None: not drawn
    yet, or a comparison of before, whose rounds all had the order of the rows."""
    schema_version: int = SCHEMA_VERSION

    def write(self, folder: Path) -> None:
        """Into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / PLAN_FILE).write_text(text + "\n")

    @staticmethod
    def read(folder: Path) -> "Plan":
        """From `folder`.

        Raises:
            RequestError: there is no plan, or it is no plan.
        """
        file = folder / PLAN_FILE
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            rows = tuple(RowPlan(**row) for row in values.pop("rows"))
            return Plan(rows=rows, **values)
        except OSError as error:
            raise RequestError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RequestError(f"{file} is no comparison of this version of accbench") from None


@dataclasses.dataclass(frozen=True)
class Row:
    """All runs of one row."""

    name: str
    rounds: tuple[Run, ...]
    synthetic: Run = dataclasses.field(default_factory=lambda: Run("synthetic"))
    numerics: Run = dataclasses.field(default_factory=lambda: Run("numerics"))
    reason: str | None = None

    @property
    def good(self) -> tuple[Run, ...]:
        """Rounds that ended well and have a speed."""
        return tuple(run for run in self.rounds if run.status == "ok" and run.samples_per_s)

    @property
    def failure(self) -> str | None:
        """Why the row has no speed, if it has none."""
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
        """Median over the good rounds of a property of `Run`."""
        values = [getattr(run, name) for run in self.good]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A plan and what came of it."""

    name: str
    plan: Plan
    rows: tuple[Row, ...]
    reference: Run = dataclasses.field(default_factory=lambda: Run(REFERENCE))
    floors: tuple[Run, ...] = ()
    """Numerics passes of plain ddp."""
    mixed: tuple[str, ...] = ()
    """Settings in which the runs differ, a line each; empty where all is alike."""

    @property
    def baseline(self) -> Row:
        """The row that the others are held against."""
        return next(row for row in self.rows if row.name == self.plan.baseline)


def counted(found: Comparison) -> tuple[str, int]:
    """What the speeds of its reports are told in, and how many of them a sample has."""
    return runs.counted(run for row in found.rows for run in row.rounds)


def round_folder(folder: Path, number: int, row: RowPlan) -> Path:
    """Where a round's run lies; rounds count from 1."""
    return folder / "rounds" / f"{number:02}" / row.folder


def synthetic_folder(folder: Path, row: RowPlan) -> Path:
    """Where the run without input lies."""
    return folder / "synthetic" / row.folder


def numerics_folder(folder: Path, name: str) -> Path:
    """Where a numerics pass lies, of a row's folder name or of a reference."""
    return folder / "numerics" / name


def read(folder: Path, allow_mixed: bool = False) -> Comparison:
    """A comparison and all its runs.

    Raises:
        RequestError: there is no comparison, or its runs do not belong side by side.
    """
    plan = Plan.read(folder)
    rows = tuple(
        Row(
            name=row.name,
            rounds=tuple(
                runs.read_if_there(round_folder(folder, number, row))
                for number in range(1, plan.repeats + 1)
            ),
            synthetic=runs.read_if_there(synthetic_folder(folder, row)),
            numerics=runs.read_if_there(numerics_folder(folder, row.folder)),
            reason=row.reason,
        )
        for row in plan.rows
    )
    mixed = check_mixed([run for row in rows for run in row.rounds], allow_mixed)
    return Comparison(
        folder.name, plan, rows,
        reference=runs.read_if_there(numerics_folder(folder, REFERENCE)),
        floors=tuple(runs.read_if_there(numerics_folder(folder, name)) for name in FLOORS),
        mixed=mixed,
    )  # fmt: skip


def check_mixed(found: list[Run], allow_mixed: bool) -> tuple[str, ...]:
    """In which settings runs differ, a line each.

    Raises:
        RequestError: they differ, and that was not asked for.
    """
    settings = [run.setting() for run in found if run.header is not None]
    lines = []
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = sorted({str(setting.get(key)) for setting in settings})
        if len(values) > 1:
            lines.append(f"{key}: {', '.join(values)}")
    if lines and not allow_mixed:
        raise RequestError(
            f"these runs do not belong side by side ({'; '.join(lines)}); "
            "to see them so all the same: --allow_mixed"
        )
    return tuple(lines)
