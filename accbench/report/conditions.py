"""Conditions that fail a comparison (`--fail_if`), and the exit status of a judged comparison."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from accbench.errors import RequestError
from accbench.report import analysis, comparison, numerics, verdict
from accbench.report.analysis import ComparisonResult, RowResult

NOT_JUDGED_STATUS = 1
"""Exit status of a comparison with a row that failed or is not valid."""
FAILED_CONDITION_STATUS = 3
"""Exit status of a comparison of which a condition of `--fail_if` holds."""

_WORDS: dict[str, Callable[[RowResult], bool]] = {
    "slower": lambda row: row.verdict == verdict.SLOWER,
    "faster": lambda row: row.verdict == verdict.FASTER,
    "not faster": lambda row: row.verdict in (verdict.SLOWER, verdict.NO_DIFFERENCE),
    "differs": lambda row: row.numerics.verdict == numerics.DIFFERS,
    "not checked": lambda row: row.numerics.verdict == numerics.NOT_CHECKED,
    "not valid": lambda row: row.verdict == verdict.NOT_VALID,
    "failed": lambda row: row.verdict == verdict.FAILED,
}
_OF_NUMERICS = ("differs", "not checked")
_OF_SPEED = ("slower", "faster", "not faster")
_LIMIT = re.compile(r"(slower|faster) than (\d+(?:\.\d+)?|\.\d+)x?")
_CHOICES = ", ".join((*_WORDS, "slower than X", "faster than X"))


@dataclasses.dataclass(frozen=True)
class Condition:
    """One condition of `--fail_if`: what must not hold of a row."""

    row: str
    words: str
    """A key of the words, or `slower` or `faster` where there is a limit."""
    limit: float | None = None
    """The speedup that the whole interval lies below, or above; None where a verdict decides."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" than {self.limit:g}"
        return f"{self.row} {self.words}{limit}"

    @property
    def needs_numerics(self) -> bool:
        """Return whether only the numerics pass can tell."""
        return self.words in _OF_NUMERICS

    def holds(self, row: RowResult) -> bool:
        """Return whether the condition is shown to hold of a row.

        A limit is as strict as a verdict: the whole 95 % interval has to be beyond it. A row whose
        speed is not valid is neither slower nor faster than anything.
        """
        if self.limit is None:
            return _WORDS[self.words](row)
        if not is_judged(row) or row.speedup_ci95 is None:
            return False
        low, high = row.speedup_ci95
        return high < self.limit if self.words == "slower" else low > self.limit


def parse(text: str | None, rows: Sequence[str], baseline: str) -> tuple[Condition, ...]:
    """Parse `ROW WORDS, ROW WORDS, ...` into conditions; none of None.

    Args:
        text: what `--fail_if` was given.
        rows: the names of the comparison's rows.
        baseline: the name of the row that has no speedup.

    Raises:
        RequestError: a row or a word is unknown, or the baseline is to be slower or faster.
    """
    if text is None:
        return ()
    conditions = tuple(_parse_one(part.strip(), rows, baseline) for part in text.split(","))
    return tuple(dict.fromkeys(conditions))


def _parse_one(text: str, rows: Sequence[str], baseline: str) -> Condition:
    row = max((name for name in rows if f"{text} ".startswith(f"{name} ")), key=len, default=None)
    if row is None:
        raise RequestError(
            f"--fail_if {text!r} begins with none of the rows: {', '.join(rows)}; it is a row and "
            f"one of: {_CHOICES}"
        )
    words = " ".join(text[len(row) :].split())
    limit = _LIMIT.fullmatch(words)
    if limit is None and words not in _WORDS:
        raise RequestError(f"--fail_if {text!r}: after {row} comes one of: {_CHOICES}")
    if row == baseline and (limit is not None or words in _OF_SPEED):
        raise RequestError(
            f"--fail_if {text!r}: {row} is the baseline, which has no speedup; name another row"
        )
    return Condition(row, words) if limit is None else Condition(row, limit[1], float(limit[2]))


def is_judged(row: RowResult) -> bool:
    """Return whether the row has a verdict: neither failed nor not valid."""
    return row.verdict not in (verdict.FAILED, verdict.NOT_VALID)


def exit_status(result: ComparisonResult, conditions: Sequence[Condition], prog: str) -> int:
    """Print a line to standard error for each condition that holds, and return the exit status.

    The status is 3 where a condition holds, else 1 where a row is not judged, else 0.
    """
    rows = {row.name: row for row in result.rows}
    broken = [condition for condition in conditions if condition.holds(rows[condition.row])]
    for condition in broken:
        facts = " ".join(_facts(rows[condition.row], result.baseline, condition).split())
        print(f"{prog}: --fail_if {str(condition)!r} holds: {facts}", file=sys.stderr)
    if broken:
        return FAILED_CONDITION_STATUS
    return 0 if all(map(is_judged, result.rows)) else NOT_JUDGED_STATUS


def judge(
    folders: Sequence[Path], fail_if: str | None
) -> list[tuple[ComparisonResult, tuple[Condition, ...]]]:
    """Judge comparisons by their folders, and parse the conditions for the rows of each.

    Without conditions nothing is judged.

    Raises:
        RequestError: a folder holds no comparison, or the conditions do not fit its rows.
    """
    judged: list[tuple[ComparisonResult, tuple[Condition, ...]]] = []
    if fail_if is None:
        return judged
    for folder in folders:
        if not (folder / comparison.PLAN_FILE).exists():
            raise RequestError(f"--fail_if is for comparisons, and {folder} holds none")
        result = analysis.judge(comparison.read(folder, allow_mixed=True))
        names = [row.name for row in result.rows]
        judged.append((result, parse(fail_if, names, result.baseline)))
    return judged


def _facts(row: RowResult, baseline: str, condition: Condition) -> str:
    """Return what was measured that makes the condition hold."""
    if condition.words == "differs":
        return f"{row.name}'s training differs ({row.numerics.reason})"
    if condition.words == "not checked":
        return f"{row.name}'s training was not checked ({row.numerics.reason})"
    if row.speedup is None or row.speedup_ci95 is None or not is_judged(row):
        return f"{row.name} is {row.verdict} ({'; '.join(row.reasons)})"
    low, high = row.speedup_ci95
    return f"{row.speedup:.3f}x the speed of {baseline}, 95 % interval {low:.3f} to {high:.3f}"
