"""The noise of a type, and the limits from which a distance from float64 is a difference."""

import dataclasses
import statistics
from collections.abc import Sequence

from accbench.report.draws import RoundingDraws
from accbench.report.run import RecordedRun

# A step is a sharp test where this relative error of the whole gradient would be found in it.
SHARP = 0.1

Steps = list[dict[str, float]]
"""Step -> quantity -> distance; a scale is signed."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The limit from which a distance is a difference: a multiple of the noise, or a floor.

    The noise of float32 is that of the order of sums, in which programs differ. Code after
    BatchNorm of a few values multiplies it by much in one step and by little in the next, in each
    program in another: so a step may have four times the median.
    """

    times: float
    times_of_16_bit: float
    least: float
    """The floor in one step."""
    least_of_all: float
    """The floor in three of four steps."""
    least_spacings: float = 0.0
    """The floor in both cases, in spacings of 16-bit numbers.

    A factor of dropout or a mean that one program rounds to 16 bits, and another does not, is off
    by one spacing in all steps."""


# Half of the spacing of numbers around 1: the largest error of rounding.
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


def step_distances(run: RecordedRun) -> Steps:
    """Return the distances of the steps from the reference's state."""
    return [record.distances for record in run.numerics if record.phase == "step"]


def quantity_kind(name: str) -> str:
    """Return a quantity's kind: `gradient of net.fc.weight` -> gradient."""
    for kind in ("second moment", "average", "gradient", "scale", "update", "buffer", "state"):
        if name == kind or name.startswith((f"{kind} of ", f"{kind} ")):
            return kind
    return name


class Noise:
    """The distance of right programs of a type from float64, from passes of plain ddp.

    The passes' draws tell how much each step makes of rounding, which two floors alone do not.
    """

    def __init__(self, floors: Sequence[RecordedRun], dtype: str | None) -> None:
        self.draws = RoundingDraws(floors)
        self.floors, self.spacing = (
            [step_distances(f) for f in floors],
            _SPACING.get(dtype or "", 0.0),
        )
        self.of_16_bit = self.spacing > 0
        self.num_steps = min(len(floor) for floor in self.floors)
        steps = [step for floor in self.floors for step in floor]
        # A tensor whose gradient nearly vanishes in a step has no scale there.
        names = [n for n in steps[0] if all(n in step for step in steps)] if self.num_steps else []
        self.medians = {
            name: max(statistics.median(abs(s[name]) for s in floor) for floor in self.floors)
            for name in names
        }
        medians_of_kind: dict[str, list[float]] = {}
        for name, median in self.medians.items():
            medians_of_kind.setdefault(quantity_kind(name), []).append(median)
        # A tensor that happens to be exact sets no standard.
        self.of_kinds = {
            kind: statistics.median(values) for kind, values in medians_of_kind.items()
        }

    def limit(self, step: int, name: str) -> float:
        """Return the distance from which a step differs."""
        noise, usual = max(abs(floor[step][name]) for floor in self.floors), self._usual(name)
        if self.of_16_bit:  # its draws are rounded once, as floors are
            noise = max(noise, usual, self.draws.largest(step, name))
            return self._limit(name, noise, of_all=False)
        noise = max(noise, _UNSTEADY * usual)
        return max(self._limit(name, noise, of_all=False), self.draws.limit(step, name))

    def limit_of_all(self, name: str) -> float:
        """Return the limit for three of four steps of a row, against the median of the floors."""
        limit = self._limit(name, self._usual(name), of_all=True)
        return limit if self.of_16_bit else max(limit, self.draws.limit_of_all(name))

    def _usual(self, name: str) -> float:
        return max(self.medians[name], self.of_kinds[quantity_kind(name)])

    def _limit(self, name: str, noise: float, of_all: bool) -> float:
        bound = BOUNDS[quantity_kind(name)]
        times = bound.times_of_16_bit if self.of_16_bit else bound.times
        least = max(bound.least_spacings * self.spacing, bound.least_of_all)
        return max(times * noise, least if of_all else max(least, bound.least))

    def scales(self, step: int, name: str = "scale") -> tuple[float, float]:
        """Return the bounds of a gradient's size in a step, relative to the reference's.

        Rounding to 16 bits makes gradients smaller as a whole, in ddp by some factor and in a
        program that rounds less often by less: any size between ddp's and float64's is right.
        """
        values = [floor[step][name] for floor in self.floors]
        least = _SCALE_LEAST
        if not self.of_16_bit:
            noise = max(*(abs(value) for value in values), _UNSTEADY * self.medians[name])
            least = max(least, _SCALE_TIMES * noise, self.draws.size(step, name))
        return self._around(values, name, least)

    def scales_of_all(self, name: str) -> tuple[float, float]:
        """Return the bounds of a gradient's size in three of four steps."""
        values = [statistics.median(step[name] for step in floor) for floor in self.floors]
        draw_limit = self.draws.limit_of_all(name)
        if self.of_16_bit:  # its draws count as floors do; that of all gradients is steady
            draw_limit = 0.0 if name == "scale" else self.draws.lower_quartile(name)
        least = max(_SCALE_LEAST_OF_ALL, draw_limit)
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
        """Return the smallest relative error of the whole gradient that is outside of `scales`."""
        low, high = self.scales_of_all("scale") if step is None else self.scales(step)
        return max(1 - low / high, high / low - 1) if low > 0 else 1.0

    def sharp(self, step: int) -> bool:
        """Return whether a gradient of 0.9 times its size, or a step left out, would be found."""
        updates = [name for name in self.medians if quantity_kind(name) == "update"]
        finds_skipped = all(self.limit(step, name) < 1 for name in updates)
        return self.sensitivity(step) < SHARP and finds_skipped
