"""Judge whether an engine trains the same, by its distances from float64 and its type's noise.

The noise of a type is the distance of plain ddp, in both memory layouts, from float64, whatever
row is called the baseline. A distance counts as a difference where it is several times that
noise: in one step, or, far more sharply, in three of four steps. A step in which the noise is so
high that a gradient of 0.9 times its size would pass is no test.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from accbench.recording.records import NumericsRecord
from accbench.report import draws
from accbench.report.comparison import Comparison, ComparisonRow
from accbench.report.noise import BOUNDS, Bound, Noise, Steps, quantity_kind, step_distances
from accbench.report.run import RecordedRun
from accbench.report.statistics import lower_quartile

SAME, DIFFERS, NOT_CHECKED = "trains the same", "differs", "not checked"
_TOO_NOISY = "too noisy"
_AWAITS_DRAWS = "plain ddp's free run was not repeated, which decides about this row's"


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
    """The largest distance, as a multiple of its limit."""
    crashed: bool = False
    """Whether a pass that the verdict needs began and did not end.

    That is the row's own, float64's or plain ddp's."""
    num_steps: int = 0
    """Steps that were compared one by one."""
    num_sharp_steps: int = 0
    """Steps in which an error of a tenth of the gradient, or a step left out, would be found."""
    sensitivity: float | None = None
    """The smallest relative error of the whole gradient that would be found in any one step."""
    sensitivity_of_all: float | None = None
    """The smallest relative error that would be found if all steps had it."""
    tested: tuple[str, ...] = ()
    """The phases that were compared besides the steps."""

    @property
    def is_too_noisy(self) -> bool:
        """Whether rounding alone, in plain ddp, could hide a difference."""
        return (self.reason or "").startswith(_TOO_NOISY)


# Order of differences: in a step, then those that only many steps show, then all others.
_SHARED, _LATE, _MOST = 1 << 20, 1 << 21, 1e9
# Quantities without noise, and their limits.
_EXACT = {
    "applied steps": 0.5, "dropout calls": 0.5, "loss scale": 0.01, "growth tracker": 0.5,
    "tensors": 0.5, "state": 1e-5, "problems": 0.5, "parameters": 0.0,
}  # fmt: skip
_FREE_LOSS = Bound(8, 8, 1e-3, 0)
# (phase, quantity) -> (its words, the limit from which it counts).
_AT_THE_END = {
    ("free end", "parameters"): ("the weights after the free run are", Bound(4, 4, 0.1, 0)),
    ("free end", "way"): ("the way of the weights in the free run is", Bound(8, 8, 0.05, 0)),
    ("evaluation", "loss"): ("the loss in evaluation is", Bound(8, 8, 1e-3, 0)),
}

_OTHER_PHASES = {
    "evaluation": "evaluation", "overflow": "a step that overflows", "free": "a free run",
    "own dropout": "its own dropout", "script": "", "without dropout": "",
}  # fmt: skip


def judge(comparison: Comparison, row: ComparisonRow) -> Numerics:
    """Compare a row's numerics pass with the reference."""
    if comparison.plan.numerics_steps == 0:
        return Numerics(NOT_CHECKED, None, "--numerics_steps 0")
    return judge_run(row.numerics, comparison.reference, comparison.floors)


def judge_run(run: RecordedRun, reference: RecordedRun, floors: Sequence[RecordedRun]) -> Numerics:
    """Compare one numerics pass with the reference.

    Args:
        run: the pass to judge.
        reference: the float64 pass.
        floors: passes of plain ddp, which give the noise.
    """
    header = run.header
    dtype = (header.amp_dtype or "float32") if header else None
    missing = _missing_pass(run, reference, floors)
    if missing:
        crashed = any(
            pass_run.status not in ("ok", "not run") for pass_run in (run, reference, *floors)
        )
        return Numerics(NOT_CHECKED, dtype, missing, crashed=crashed)
    problem = next((r.note for r in reference.numerics if r.note), None)
    if problem:
        return Numerics(NOT_CHECKED, dtype, problem)
    noise = Noise(floors, dtype)
    findings = Findings(dtype)
    findings.ranks(run.numerics)
    findings.exact(run.numerics)
    refused = next((r.note for r in run.numerics if r.phase == "not loadable"), None)
    if refused and not findings.any:
        return Numerics(NOT_CHECKED, dtype, f"the reference's state cannot be loaded: {refused}")
    findings.steps(step_distances(run), noise)
    differs_in_steps = findings.any
    findings.free_run(run, floors)
    if findings.any and not differs_in_steps and _lack_free_draws(floors):
        return Numerics(NOT_CHECKED, dtype, _AWAITS_DRAWS)
    return findings.verdict(noise, run)


def needs_free_draws(comparison: Comparison) -> bool:
    """Return whether a row's verdict depends on draws of the free run, which are still missing.

    Draws only widen the limits of a free run. So they matter only where the two floors alone would
    call a row's free run different, and nothing else of the row differs.
    """
    reference, floors = comparison.reference, comparison.floors
    verdicts = (judge_run(row.numerics, reference, floors) for row in comparison.rows)
    return any(verdict.reason == _AWAITS_DRAWS for verdict in verdicts)


def _lack_free_draws(floors: Sequence[RecordedRun]) -> bool:
    """Return whether steps were drawn and free runs not; older passes have neither."""
    phases = [{record.phase for record in floor.numerics} for floor in floors]
    return any("noise" in names and "noise of free" not in names for names in phases)


def _missing_pass(
    run: RecordedRun, reference: RecordedRun, floors: Sequence[RecordedRun]
) -> str | None:
    passes = [("the float64 reference", reference), ("its pass", run)]
    passes += [("plain ddp's pass", floor) for floor in floors]
    for label, pass_run in passes:
        if pass_run.status != "ok":
            why = f": {pass_run.end.error}" if pass_run.end and pass_run.end.error else ""
            return f"{label} did not end ({pass_run.status}{why})"
        if not pass_run.numerics:
            return f"{label} holds nothing that this version can read"
    return None


class Findings:
    """The differences found in a pass, ordered by the step of each."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self.worst = 0.0
        self._differences: list[tuple[int, float, int, str, str]] = []

    @property
    def any(self) -> bool:
        """Whether anything differs."""
        return bool(self._differences)

    def _note(
        self, step: int, in_limits: float, name: str, reason: str, order: int | None = None
    ) -> None:
        """Note a distance, and a difference where it exceeds its limit.

        Args:
            step: steps done, from 1.
            in_limits: the distance as a multiple of its limit.
            name: the quantity that differs.
            reason: the sentence for a person.
            order: position among the differences; None takes the step. Large for a difference that
                is only told where no step differs.
        """
        self.worst = max(self.worst, min(in_limits, _MOST))
        if in_limits > 1:
            self._differences.append(
                (step if order is None else order, -in_limits, step, name, reason)
            )

    def ranks(self, numerics_records: Iterable[NumericsRecord]) -> None:
        """Note parameters that differ between ranks."""
        for record in numerics_records:
            if record.ranks_apart:
                reason = "ranks hold different parameters: their gradients are not averaged"
                self._note(record.step, 2 * _MOST, "parameters", reason)

    def exact(self, numerics_records: Iterable[NumericsRecord]) -> None:
        """Note counts that differ, and loaded values that are not exact."""
        for record in numerics_records:
            if record.phase.startswith("noise"):  # which no program is held to
                continue
            for name, distance in record.distances.items():
                limit = _EXACT.get(quantity_kind(name))
                if limit is None or record.phase == "free end" and name == "parameters":
                    continue
                what = record.note or f"{record.phase} {record.step}: {name} off by {distance:.3g}"
                in_limits = _MOST if abs(distance) > limit else 0.0
                late = None if record.phase in ("start", "step") else _LATE
                self._note(record.step, in_limits, name, what, late)

    def steps(self, steps: Steps, noise: Noise) -> None:
        """Note differences in single steps, and those that most steps share."""
        steps = steps[: noise.num_steps]
        if not steps:  # it could not be loaded
            return
        names = [name for name in noise.medians if quantity_kind(name) in BOUNDS]
        scales = [name for name in noise.medians if quantity_kind(name) == "scale"]
        for number, step in enumerate(steps):
            for name in names:
                self._distance(number + 1, name, step.get(name, 1e30), noise.limit(number, name))
            self._scale(number + 1, "scale", step.get("scale", 1e30), noise.scales(number))
        for name in names:
            shared = lower_quartile(step.get(name, 1e30) for step in steps)
            self._distance(None, name, shared, noise.limit_of_all(name))
        for name in scales:
            shared = lower_quartile(step.get(name, 1e30) for step in steps)
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

    def free_run(self, run: RecordedRun, floors: Sequence[RecordedRun]) -> None:
        """Note losses that diverge in the free run, and weights that differ at its end.

        The free run loads nothing from the reference.
        """
        highest = 0.0
        loss_distances = {r.step: r.distances["loss"] for r in run.numerics if r.phase == "free"}
        for step, distance in loss_distances.items():
            at_step = self._limit(floors, "free", "loss", _FREE_LOSS, step)
            highest = limit = max(highest, at_step)
            reason = f"the loss of the free run at step {step} is {distance:.2g} off"
            reason += f", more than {limit:.2g}"
            self._note(step, distance / limit, "loss", reason, _LATE + step)
        for (phase, name), (what, bound) in _AT_THE_END.items():
            values = _values(run, phase, name)
            if not values:  # it could not be loaded
                continue
            limit = self._limit(floors, phase, name, bound)
            reason = f"{what} {values[-1]:.2g} off, more than {limit:.2g}"
            self._note(len(loss_distances), abs(values[-1]) / limit, name, reason, 2 * _LATE)

    def _limit(
        self,
        floors: Sequence[RecordedRun],
        phase: str,
        name: str,
        bound: Bound,
        step: int | None = None,
    ) -> float:
        """Return the limit of a single number, from the floors and their draws."""
        of_floors = [v for floor in floors for v in _values(floor, phase, name, step)]
        drawn = [v for floor in floors for v in _values(floor, f"noise of {phase}", name, step)]
        # Draws count as one rounding, though they are four: weights that diverge go as far apart
        # after one rounding as after four.
        noise = max(draws.root_mean_square(drawn), 0.0, *map(abs, of_floors))
        return max(bound.times * noise, bound.least)

    def verdict(self, noise: Noise, run: RecordedRun) -> Numerics:
        """Return the verdict: a difference counts before not checked, and that before the same."""
        sharp = [noise.sharp(step) for step in range(noise.num_steps)]
        phases = {record.phase for record in run.numerics}
        common = Numerics(
            SAME, self.dtype, worst=self.worst,
            num_steps=noise.num_steps, num_sharp_steps=sum(sharp),
            sensitivity=max(
                (noise.sensitivity(s) for s in range(noise.num_steps)), default=None
            ),
            sensitivity_of_all=noise.sensitivity() if noise.num_steps else None,
            tested=tuple(phase for phase in _OTHER_PHASES if phase in phases),
        )  # fmt: skip
        if self._differences:
            _, _, step, name, reason = min(self._differences)
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


def _values(run: RecordedRun, phase: str, name: str, step: int | None = None) -> list[float]:
    """Return the distances of a quantity in a phase, in all its steps or in one."""
    phase_records = (r for r in run.numerics if r.phase == phase and step in (None, r.step))
    return [r.distances[name] for r in phase_records if name in r.distances]


def describe_coverage(numerics: Numerics) -> str | None:
    """Describe what was tested and how sharply; None where nothing was."""
    if (
        not numerics.num_steps
        or numerics.sensitivity is None
        or numerics.sensitivity_of_all is None
    ):
        return None
    other_tests = [_OTHER_PHASES[phase] for phase in numerics.tested if _OTHER_PHASES[phase]]
    undropped = "; these without dropout, whose masks differ where a batch is shared"
    missing = "; not tested, of a script: evaluation, overflow in float16, its own dropout"
    return (
        f"{numerics.num_steps} steps beside float64, {numerics.num_sharp_steps} of them sharp "
        f"tests: {numerics.sensitivity:.2%} of the gradient in one step, or "
        f"{numerics.sensitivity_of_all:.2%} in all, would have been seen"
        f"{'; also tested: ' if other_tests else ''}{', '.join(other_tests)}"
        f"{undropped if 'without dropout' in numerics.tested else ''}"
        f"{missing if 'script' in numerics.tested else ''}"
    )
