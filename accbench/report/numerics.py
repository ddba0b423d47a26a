"""Does an engine train the same? Its distances from float64 against what its type allows.

The noise of a type is what plain ddp in both memory layouts is away from float64, whatever
row is called the baseline. A distance counts as a difference where it is several times that
noise: in one step, or, far more sharply, in three of four steps. A step in which the
noise is so high that a gradient of 0.9 times its size would pass is no test.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from accbench.recording.records import NumericsRecord
from accbench.report import draws
from accbench.report.comparison import Comparison, Row
from accbench.report.noise import BOUNDS, Bound, Noise, Steps, kind_of, steps_of
from accbench.report.run import Run
from accbench.report.statistics import in_most

SAME, DIFFERS, NOT_CHECKED = "trains the same", "differs", "not checked"
_TOO_NOISY = "too noisy"


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The verdict on one row."""

    verdict: str
    dtype: str | None = None
    reason: str | None = None
    """Why not checked, or what differs."""
    first_step: int | None = None
    first_tensor: str | None = None
    """What differs first, such as `gradient of net.fc.weight`."""
    worst: float | None = None
    """The largest distance, in parts of what would be a difference."""
    crashed: bool = False
    """Whether a pass that this takes began and did not end: its own, float64's or plain ddp's."""
    num_steps: int = 0
    """Steps that were looked at one by one."""
    num_sharp_steps: int = 0
    """Those in which an error of a tenth of the gradient, or a step left out, would be found."""
    sensitivity: float | None = None
    """The smallest relative error of the whole gradient that would be found in any one step."""
    sensitivity_of_all: float | None = None
    """Likewise of an error that is there in all steps."""
    tested: tuple[str, ...] = ()
    """What was looked at beside the steps."""

    @property
    def is_too_noisy(self) -> bool:
        """Whether rounding alone, in plain ddp, could hide what would be a difference."""
        return (self.reason or "").startswith(_TOO_NOISY)


# A difference in a step is told before one that only many steps show, and that before others.
_SHARED, _LATE, _MOST = 1 << 20, 1 << 21, 1e9
# What has no noise.
_EXACT = {
    "applied steps": 0.5, "dropout calls": 0.5, "loss scale": 0.01, "growth tracker": 0.5,
    "tensors": 0.5, "state": 1e-5, "problems": 0.5, "parameters": 0.0,
}  # fmt: skip
_FREE_LOSS = Bound(8, 8, 1e-3, 0)
# (phase, quantity) -> its words, from where on it counts.
_AT_THE_END = {
    ("free end", "parameters"): ("the weights after the free run are", Bound(4, 4, 0.1, 0)),
    ("free end", "way"): ("the way of the weights in the free run is", Bound(8, 8, 0.05, 0)),
    ("evaluation", "loss"): ("the loss in evaluation is", Bound(8, 8, 1e-3, 0)),
}

_BESIDE_STEPS = {
    "evaluation": "evaluation", "overflow": "a step that overflows", "free": "a free run",
    "own dropout": "its own dropout", "script": "",
}  # fmt: skip


def judge(comparison: Comparison, row: Row) -> Numerics:
    """Compare a row's numerics pass with the reference."""
    if comparison.plan.numerics_steps == 0:
        return Numerics(NOT_CHECKED, None, "--numerics_steps 0")
    return judge_run(row.numerics, comparison.reference, comparison.floors)


def judge_run(run: Run, reference: Run, floors: Sequence[Run]) -> Numerics:
    """Likewise, of one pass.

    Args:
        floors: passes of plain ddp.
    """
    header = run.header
    dtype = (header.amp_dtype or "float32") if header else None
    missing = _missing(run, reference, floors)
    if missing:
        crashed = any(one.status not in ("ok", "not run") for one in (run, reference, *floors))
        return Numerics(NOT_CHECKED, dtype, missing, crashed=crashed)
    other = next((r.note for r in reference.numerics if r.note), None)
    if other:
        return Numerics(NOT_CHECKED, dtype, other)
    noise = Noise(floors, dtype)
    found = Findings(dtype)
    found.ranks(run.numerics)
    found.exact(run.numerics)
    refused = next((r.note for r in run.numerics if r.phase == "not loadable"), None)
    if refused and not found.any:
        return Numerics(NOT_CHECKED, dtype, f"the reference's state cannot be loaded: {refused}")
    found.steps(steps_of(run), noise)
    found.free_run(run, floors)
    return found.verdict(noise, run)


def _missing(run: Run, reference: Run, floors: Sequence[Run]) -> str | None:
    named = [("the float64 reference", reference), ("its pass", run)]
    named += [("plain ddp's pass", floor) for floor in floors]
    for what, one in named:
        if one.status != "ok":
            why = f": {one.end.error}" if one.end and one.end.error else ""
            return f"{what} did not end ({one.status}{why})"
        if not one.numerics:
            return f"{what} holds nothing that this version can read"
    return None


class Findings:
    """What is different in a pass, the first step first."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self.worst = 0.0
        self._found: list[tuple[int, float, int, str, str]] = []

    @property
    def any(self) -> bool:
        """Whether anything differs."""
        return bool(self._found)

    def _note(
        self, step: int, in_limits: float, name: str, reason: str, order: int | None = None
    ) -> None:
        """`order` is that of the step, unless it is told only where no step differs."""
        self.worst = max(self.worst, min(in_limits, _MOST))
        if in_limits > 1:
            self._found.append((step if order is None else order, -in_limits, step, name, reason))

    def ranks(self, found: Iterable[NumericsRecord]) -> None:
        """Parameters that ranks do not share."""
        for record in found:
            if record.ranks_apart:
                reason = "ranks hold different parameters: their gradients are not averaged"
                self._note(record.step, 2 * _MOST, "parameters", reason)

    def exact(self, found: Iterable[NumericsRecord]) -> None:
        """Counts, and what was loaded."""
        for record in found:
            if record.phase.startswith("noise"):  # which no program is held to
                continue
            for name, distance in record.distances.items():
                limit = _EXACT.get(kind_of(name))
                if limit is None or record.phase == "free end" and name == "parameters":
                    continue
                what = record.note or f"{record.phase} {record.step}: {name} off by {distance:.3g}"
                in_limits = _MOST if abs(distance) > limit else 0.0
                late = None if record.phase in ("start", "step") else _LATE
                self._note(record.step, in_limits, name, what, late)

    def steps(self, steps: Steps, noise: Noise) -> None:
        """One by one, and what most of them share."""
        steps = steps[: noise.num_steps]
        if not steps:  # it could not be loaded
            return
        names = [name for name in noise.medians if kind_of(name) in BOUNDS]
        scales = [name for name in noise.medians if kind_of(name) == "scale"]
        for number, step in enumerate(steps):
            for name in names:
                self._distance(number + 1, name, step.get(name, 1e30), noise.limit(number, name))
            self._scale(number + 1, "scale", step.get("scale", 1e30), noise.scales(number))
        for name in names:
            shared = in_most(step.get(name, 1e30) for step in steps)
            self._distance(None, name, shared, noise.limit_of_all(name))
        for name in scales:
            shared = in_most(step.get(name, 1e30) for step in steps)
            self._scale(None, name, shared, noise.scales_of_all(name))

    def _distance(self, step: int | None, name: str, distance: float, limit: float) -> None:
        where = "in three of four steps" if step is None else f"at step {step}"
        reason = f"{name} {where} is {distance:.2g} off, more than {limit:.2g}"
        self._note(step or 1, distance / limit, name, reason, _SHARED if step is None else None)

    def _scale(
        self, step: int | None, name: str, scale: float, between: tuple[float, float]
    ) -> None:
        low, high = between
        off = max(scale / (high - 1), scale / (low - 1))
        where = "in three of four steps" if step is None else f"at step {step}"
        what = "the gradient" if name == "scale" else f"the gradient of {name.split(' of ')[1]}"
        reason = f"{what} {where} is {1 + scale:.4f} times what it should be"
        reason += f", right is {low:.4f} to {high:.4f}"
        self._note(step or 1, off, what, reason, _SHARED if step is None else None)

    def free_run(self, run: Run, floors: Sequence[Run]) -> None:
        """Losses that part, and weights that end elsewhere, though nothing was loaded."""
        highest = 0.0
        own = {r.step: r.distances["loss"] for r in run.numerics if r.phase == "free"}
        for step, distance in own.items():
            at_step = self._limit(floors, "free", "loss", _FREE_LOSS, step)
            highest = limit = max(highest, at_step)
            reason = f"the loss of the free run at step {step} is {distance:.2g} off"
            reason += f", more than {limit:.2g}"
            self._note(step, distance / limit, "loss", reason, _LATE + step)
        for (phase, name), (what, bound) in _AT_THE_END.items():
            found = _values(run, phase, name)
            if not found:  # it could not be loaded
                continue
            limit = self._limit(floors, phase, name, bound)
            reason = f"{what} {found[-1]:.2g} off, more than {limit:.2g}"
            self._note(len(own), abs(found[-1]) / limit, name, reason, 2 * _LATE)

    def _limit(
        self, floors: Sequence[Run], phase: str, name: str, bound: Bound, step: int | None = None
    ) -> float:
        """From where a single number is a difference, by what floors and their draws have."""
        of_floors = [v for floor in floors for v in _values(floor, phase, name, step)]
        drawn = [v for floor in floors for v in _values(floor, f"noise of {phase}", name, step)]
        # Draws count as one rounding, though they are four: weights that part go as far apart
        # from one as from four.
        noise = max(draws.root_mean_square(drawn), 0.0, *map(abs, of_floors))
        return max(bound.times * noise, bound.least)

    def verdict(self, noise: Noise, run: Run) -> Numerics:
        """Differs before not checked before the same."""
        sharp = [noise.sharp(step) for step in range(noise.num_steps)]
        phases = {record.phase for record in run.numerics}
        common = Numerics(
            SAME, self.dtype, worst=self.worst,
            num_steps=noise.num_steps, num_sharp_steps=sum(sharp),
            sensitivity=max(
                (noise.sensitivity(s) for s in range(noise.num_steps)), default=None
            ),
            sensitivity_of_all=noise.sensitivity() if noise.num_steps else None,
            tested=tuple(phase for phase in _BESIDE_STEPS if phase in phases),
        )  # fmt: skip
        if self._found:
            _, _, step, name, reason = min(self._found)
            return dataclasses.replace(
                common, verdict=DIFFERS, reason=reason, first_step=step, first_tensor=name
            )
        untried = (r.note for r in run.numerics if r.phase in ("evaluation", "own dropout"))
        unknown = next((note for note in untried if note), None)
        if unknown:
            return dataclasses.replace(common, verdict=NOT_CHECKED, reason=unknown)
        if not all(sharp) or not sharp:
            step = sharp.index(False) + 1 if sharp else 1
            reason = f"{_TOO_NOISY} at step {step} ({sum(sharp)} of {len(sharp)} were sharp tests)"
            return dataclasses.replace(common, verdict=NOT_CHECKED, reason=reason)
        return common


def _values(run: Run, phase: str, name: str, step: int | None = None) -> list[float]:
    """Of a phase, in all its steps or in one."""
    found = (r for r in run.numerics if r.phase == phase and step in (None, r.step))
    return [r.distances[name] for r in found if name in r.distances]


def words(found: Numerics) -> str | None:
    """What was tested, and how sharply; None where nothing was."""
    if not found.num_steps or found.sensitivity is None or found.sensitivity_of_all is None:
        return None
    beside = [_BESIDE_STEPS[phase] for phase in found.tested if phase != "script"]
    missing = "; not tested, of a script: evaluation, overflow in float16, its own dropout"
    return (
        f"{found.num_steps} steps beside float64, {found.num_sharp_steps} of them sharp tests: "
        f"{found.sensitivity:.2%} of the gradient in one step, or {found.sensitivity_of_all:.2%} "
        f"in all, would have been seen{'; also tested: ' if beside else ''}{', '.join(beside)}"
        f"{missing if 'script' in found.tested else ''}"
    )
