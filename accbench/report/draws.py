"""How much rounding does to each step, from plain ddp's steps with weights a little off."""

import math
import statistics
from collections.abc import Iterable, Sequence

from accbench.report.run import Run
from accbench.report.statistics import in_most

# A distance is a difference where it is so many times the largest of a step's draws, which are
# off by four roundings of float32 (accbench.comparing.roundings), a right program by about one.
_TIMES = 2


class Draws:
    """Limits by the draws alone, 0 where there are none, as in older passes.

    A limit is not so and so many times a draw of one rounding: a value beside a ReLU's zero, and
    BatchNorm of a few values, make one rounding a jump and the next nothing.
    """

    def __init__(self, floors: Iterable[Run]) -> None:
        of_steps: dict[int, list[dict[str, float]]] = {}
        for floor in floors:
            for record in floor.numerics:
                if record.phase == "noise":
                    of_steps.setdefault(record.step - 1, []).append(record.distances)
        self.of_steps = of_steps
        """Step, from 0 -> the distances of each draw."""

    def largest(self, step: int, name: str) -> float:
        """Of the draws of one step."""
        return max((abs(d.get(name, 0.0)) for d in self.of_steps.get(step, ())), default=0.0)

    def limit(self, step: int, name: str) -> float:
        """From where a distance in float32 is a difference in a step."""
        limit = _TIMES * self.largest(step, name)
        if " of " not in name or not self.of_steps:
            return limit
        # A jump of one tensor that is seen in a tenth of the steps may come in any.
        by_size = sorted(self.largest(other, name) for other in self.of_steps)
        return max(limit, by_size[-1 - len(by_size) // 10])

    def size(self, step: int, name: str) -> float:
        """Likewise of a size, which is off either way.

        That of all gradients together has no jumps: the root mean square of the draws is four
        times that of a right program.
        """
        if name != "scale":
            return self.limit(step, name)
        return root_mean_square([d[name] for d in self.of_steps.get(step, ())])

    def limit_of_all(self, name: str) -> float:
        """Likewise in three of four steps."""
        if not self.of_steps:
            return 0.0
        if name == "scale":
            return in_most(self.size(step, name) for step in self.of_steps)
        return _TIMES * self.in_most(name)

    def in_most(self, name: str) -> float:
        """What the largest draw has in three of four steps; 0 where there are none."""
        return in_most(self.largest(step, name) for step in self.of_steps) if self.of_steps else 0.0


def root_mean_square(values: Sequence[float]) -> float:
    """0 of none."""
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else 0.0
