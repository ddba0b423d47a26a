"""How much rounding alone changes each step: plain ddp's steps from slightly perturbed weights."""

import math
import statistics
from collections.abc import Iterable, Sequence

from accbench.report.run import RecordedRun
from accbench.report.statistics import lower_quartile

# A distance counts as a difference from this many times the largest of a step's draws. A draw is
# off by four roundings of float32 (accbench.comparing.roundings), a right program by about one.
_TIMES = 2


class RoundingDraws:
    """Limits from perturbed draws alone; 0 where there are none, as in passes of older versions.

    A limit is not a multiple of a single rounding's draw: a value beside a ReLU's zero, and
    BatchNorm of a few values, turn one rounding into a jump and the next into nothing.
    """

    def __init__(self, floors: Iterable[RecordedRun]) -> None:
        of_steps: dict[int, list[dict[str, float]]] = {}
        for floor in floors:
            for record in floor.numerics:
                if record.phase == "noise":
                    of_steps.setdefault(record.step - 1, []).append(record.distances)
        self.of_steps = of_steps
        """Step, counted from 0 -> the distances of each of its draws."""
        self._largest = {step: _largest_of_all(drawn) for step, drawn in of_steps.items()}
        self._jumps: dict[str, float] = {}

    def largest(self, step: int, name: str) -> float:
        """Return the largest distance of one step's draws."""
        return self._largest.get(step, {}).get(name, 0.0)

    def limit(self, step: int, name: str) -> float:
        """Return the smallest distance in float32 that counts as a difference in one step."""
        limit = _TIMES * self.largest(step, name)
        if " of " not in name or not self.of_steps:
            return limit
        if name not in self._jumps:
            # A jump of one tensor that a tenth of the steps show may come in any step.
            by_size = sorted(self.largest(other_step, name) for other_step in self.of_steps)
            self._jumps[name] = by_size[-1 - len(by_size) // 10]
        return max(limit, self._jumps[name])

    def size(self, step: int, name: str) -> float:
        """Return the limit in one step of a gradient's size, which may be off either way.

        The size of all gradients together has no jumps: the root mean square of the draws is four
        times that of a right program.
        """
        if name != "scale":
            return self.limit(step, name)
        return root_mean_square([d[name] for d in self.of_steps.get(step, ())])

    def limit_of_all(self, name: str) -> float:
        """Return the limit that must hold in three of four steps."""
        if not self.of_steps:
            return 0.0
        if name == "scale":
            return lower_quartile(self.size(step, name) for step in self.of_steps)
        return _TIMES * self.lower_quartile(name)

    def lower_quartile(self, name: str) -> float:
        """Return the lower quartile over the steps of the largest draw; 0 without draws."""
        return (
            lower_quartile(self.largest(step, name) for step in self.of_steps)
            if self.of_steps
            else 0.0
        )


def _largest_of_all(drawn: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest of several draws' distances: quantity -> distance."""
    largest: dict[str, float] = {}
    for distances in drawn:
        for name, distance in distances.items():
            largest[name] = max(largest.get(name, 0.0), abs(distance))
    return largest


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square; 0 for no values."""
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else 0.0
