"""The noise of a type, and from where on a distance from float64 is a difference."""

import dataclasses
import statistics
from collections.abc import Sequence

from accbench.report.draws import Draws
from accbench.report.run import Run

# A step is a sharp test where this relative error of the whole gradient would be found in it.
SHARP = 0.1

Steps = list[dict[str, float]]
"""Step -> quantity -> distance; a scale is signed."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """From where a distance is a difference: times the noise, but at least so much.

    The noise of float32 is that of the order of sums, in which programs differ, and what lies
    behind BatchNorm of a few values multiplies it by much in one step and by little in the
    next, in each program in another: so a step has four times what the median has.
    """

    times: float
    times_of_16_bit: float
    least: float
    """In one step."""
    least_of_all: float
    """In three of four steps."""
    least_spacings: float = 0.0
    """Likewise in both, in spacings of 16-bit numbers: a factor that one program rounds to 16
    bits, of dropout or a mean, and another does not, is off by one in all steps."""


# Of numbers around 1, half of what separates them: what rounding may do.
_SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Where a norm over a whole tensor is measured, rounding to 16 bits adds up to much the same in
# all programs; single numbers, and the rounding of sums in float32, differ by several times. A
# gradient jumps where a value crosses a ReLU's zero, by rounding alone: hence the large least
# distance in one step, and the small one in three of four, for not that many steps have a jump.
BOUNDS = {
    "loss": Bound(16, 8, 2e-5, 1e-5, 0.5),
    "gradient": Bound(16, 3, 0.05, 2e-4, 8),
    "update": Bound(8, 8, 1e-3, 2e-4),
    "second moment": Bound(8, 8, 1e-3, 2e-4),
    "average": Bound(8, 8, 1e-3, 2e-4),
    "buffer": Bound(16, 3, 1e-3, 2e-4, 4),
}
_SCALE_TIMES, _SCALE_LEAST, _SCALE_LEAST_OF_ALL = 8, 0.005, 0.001
# How many times the usual noise of float32 a step may have without being another program.
_UNSTEADY = 4


def steps_of(run: Run) -> Steps:
    """What was found in the steps from the reference's state."""
    return [record.distances for record in run.numerics if record.phase == "step"]


def kind_of(name: str) -> str:
    """`gradient of net.fc.weight` -> gradient."""
    for kind in ("second moment", "average", "gradient", "scale", "update", "buffer", "state"):
        if name == kind or name.startswith((f"{kind} of ", f"{kind} ")):
            return kind
    return name


class Noise:
    """What right programs of a type are away from float64, from passes of plain ddp.

    Their draws tell how much each step makes of rounding, which two floors alone do not.
    """

    def __init__(self, floors: Sequence[Run], dtype: str | None) -> None:
        self.draws = Draws(floors)
        self.floors, self.spacing = [steps_of(f) for f in floors], _SPACING.get(dtype or "", 0.0)
        self.of_16_bit = self.spacing > 0
        self.num_steps = min(len(floor) for floor in self.floors)
        steps = [step for floor in self.floors for step in floor]
        # A tensor whose gradient all but vanishes in a step has no scale there.
        names = [n for n in steps[0] if all(n in step for step in steps)] if self.num_steps else []
        self.medians = {
            name: max(statistics.median(abs(s[name]) for s in floor) for floor in self.floors)
            for name in names
        }
        of_kinds: dict[str, list[float]] = {}
        for name, median in self.medians.items():
            of_kinds.setdefault(kind_of(name), []).append(median)
        # A tensor that happens to come out exactly sets no standard.
        self.of_kinds = {kind: statistics.median(values) for kind, values in of_kinds.items()}

    def limit(self, step: int, name: str) -> float:
        """From where a distance in a step is a difference."""
        noise, usual = max(abs(floor[step][name]) for floor in self.floors), self._usual(name)
        if self.of_16_bit:  # whose draws are rounded as floors are, once
            noise = max(noise, usual, self.draws.largest(step, name))
            return self._limit(name, noise, of_all=False)
        noise = max(noise, _UNSTEADY * usual)
        return max(self._limit(name, noise, of_all=False), self.draws.limit(step, name))

    def limit_of_all(self, name: str) -> float:
        """Likewise of what a row is in three of four steps, the floors in one of two."""
        limit = self._limit(name, self._usual(name), of_all=True)
        return limit if self.of_16_bit else max(limit, self.draws.limit_of_all(name))

    def _usual(self, name: str) -> float:
        return max(self.medians[name], self.of_kinds[kind_of(name)])

    def _limit(self, name: str, noise: float, of_all: bool) -> float:
        bound = BOUNDS[kind_of(name)]
        times = bound.times_of_16_bit if self.of_16_bit else bound.times
        least = max(bound.least_spacings * self.spacing, bound.least_of_all)
        return max(times * noise, least if of_all else max(least, bound.least))

    def scales(self, step: int, name: str = "scale") -> tuple[float, float]:
        """Between which a gradient's size, as a part of the reference's, is right in a step.

        Rounding to 16 bits makes gradients smaller as a whole, in ddp by so and so much and in
        a program that rounds less often by less: anything between ddp and float64 is right.
        """
        values = [floor[step][name] for floor in self.floors]
        least = _SCALE_LEAST
        if not self.of_16_bit:
            noise = max(*(abs(value) for value in values), _UNSTEADY * self.medians[name])
            least = max(least, _SCALE_TIMES * noise, self.draws.size(step, name))
        return self._around(values, name, least)

    def scales_of_all(self, name: str) -> tuple[float, float]:
        """Likewise of three of four steps."""
        values = [statistics.median(step[name] for step in floor) for floor in self.floors]
        drawn = self.draws.limit_of_all(name)
        if self.of_16_bit:  # whose draws count as floors do; that of all gradients is steady
            drawn = 0.0 if name == "scale" else self.draws.in_most(name)
        least = max(_SCALE_LEAST_OF_ALL, drawn)
        return self._around(values, name, least)

    def _around(self, values: list[float], name: str, least: float) -> tuple[float, float]:
        apart = statistics.median(
            max(step[name] for step in steps) - min(step[name] for step in steps)
            for steps in zip(*self.floors, strict=False)
        )
        bias = max(abs(value) for value in values)
        margin = max(least, 3 * self.spacing, _SCALE_TIMES * apart, bias / 2)
        return 1 + min(0.0, *values) - margin, 1 + max(0.0, *values) + margin

    def sensitivity(self, step: int | None = None) -> float:
        """The smallest relative error of the whole gradient that is outside of `scales`."""
        low, high = self.scales_of_all("scale") if step is None else self.scales(step)
        return max(1 - low / high, high / low - 1) if low > 0 else 1.0

    def sharp(self, step: int) -> bool:
        """Whether a gradient of 0.9 times its size, or a step left out, would be found."""
        updates = [name for name in self.medians if kind_of(name) == "update"]
        found_skipped = all(self.limit(step, name) < 1 for name in updates)
        return self.sensitivity(step) < SHARP and found_skipped
