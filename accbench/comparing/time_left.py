"""How long a comparison goes on, from the runs that it has made."""

import statistics
import time
from collections.abc import Collection
from pathlib import Path

from rich.progress import ProgressColumn, Task
from rich.text import Text

from accbench.report import comparison
from accbench.report.comparison import FEWEST_ROUNDS, ComparisonPlan, ComparisonRow
from accbench.report.run import RecordedRun

# A pass of the numerics goes through its steps twice, and loads and reads the state in between:
# in steps of training.
_STEPS_PER_CHECKED_STEP = 6


def estimate_s(
    plan: ComparisonPlan, folder: Path, with_input_round: Collection[str]
) -> float | None:
    """Return the seconds that the comparison goes on; None until each row has a run.

    A round takes as long as the median of a row's rounds, without the first where there are others,
    or as the first without what it compiled.
    Rows that are not decided are taken to go on to `repeats`.

    Args:
        plan: the plan.
        folder: the comparison's folder.
        with_input_round: names of the rows that run once on synthetic data.
    """
    rows = comparison.read_rows(plan, folder)
    alive = [
        row
        for row in rows
        if row.reason is None and all(run.status in ("ok", "not run") for run in row.rounds)
    ]
    if not alive or any(not row.good for row in alive):
        return None
    rounds_s = sum(_round_s(row) * (len(row.rounds) - len(row.good)) for row in alive)
    if plan.max_minutes is not None:
        spent_s = sum(run.duration_s for row in rows for run in row.rounds)
        # Two rounds are made in any case.
        least_s = sum(_round_s(row) for row in alive if len(row.good) < FEWEST_ROUNDS)
        rounds_s = min(rounds_s, max(least_s, 60 * plan.max_minutes - spent_s))
    after_s = sum(
        _round_s(row)
        for row in alive
        if row.name in with_input_round and row.synthetic.status == "not run"
    )
    return rounds_s + after_s + (_numerics_s(plan, folder, alive) if plan.numerics_steps else 0.0)


def _round_s(row: ComparisonRow) -> float:
    first, *warm = row.good
    if warm:
        return statistics.median(run.duration_s for run in warm)
    # Later rounds load what it has compiled, where the engine can.
    compile_s = first.end.compile_s if first.end else None
    return max(0.0, first.duration_s - (compile_s or 0.0))


def _numerics_s(plan: ComparisonPlan, folder: Path, rows: list[ComparisonRow]) -> float:
    first = next((row for row in rows if row.name == plan.baseline), rows[0])
    done = comparison.read(folder, allow_mixed=True)
    plain = [done.reference, *done.floors]
    seconds = [_pass_s(plan, first) for run in plain if not _has_run(run)]
    seconds += [_pass_s(plan, row) for row in rows if not _has_run(row.numerics)]
    return sum(seconds)


def _has_run(run: RecordedRun) -> bool:
    return run.status != "not run"


def _pass_s(plan: ComparisonPlan, row: ComparisonRow) -> float:
    run = row.good[-1]
    start_s = run.end.time_to_first_step_s if run.end else None
    steps_per_s = run.steps_per_s or 1.0
    return (start_s or 0.0) + _STEPS_PER_CHECKED_STEP * plan.numerics_steps / steps_per_s


def in_words(seconds: float) -> str:
    """Return a duration as `about 4 min 30 s`, to ten seconds beyond a minute."""
    if seconds < 60:
        return f"about {max(1, round(seconds))} s"
    minutes, tens = divmod(round(seconds / 10), 6)
    return f"about {minutes} min" + (f" {10 * tens} s" if tens else "")


class TimeLeftColumn(ProgressColumn):
    """A clock of the time left, from the progress's field `ends_at` by `time.monotonic`."""

    def render(self, task: Task) -> Text:
        """Return what is left, or nothing while it is not known."""
        ends_at = task.fields.get("ends_at")
        if ends_at is None:
            return Text("")
        left_s = ends_at - time.monotonic()
        return Text(f"{in_words(left_s)} left" if left_s > 0 else "a little longer")
