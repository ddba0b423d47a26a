"""Does an engine train the same? Its distance to a float64 run against the baseline's own.

Distances are measured between sketches (see `accbench.comparing.numerics.sketch`), as parts
of how far the float64 run itself moved. What the baseline and its other memory
layout are away from that run is the noise floor of the type they compute in.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping

from accbench.recording.records import NumericsRecord
from accbench.report.comparison import Comparison, Row
from accbench.report.run import Run

SAME, DIFFERS, NOT_CHECKED = "trains the same", "differs", "not checked"
# How many times the noise floor a distance may be. Sketches tell a distance to a
# third, and two right programs of one type differ by a few times.
TOLERANCE = 8.0
# A few last bits of float32: a floor of nothing would forbid them.
_RESOLUTION = 2.0**-20
LOSS, GRAD_NORM = "loss", "gradient norm"
_GRADIENT, _UPDATE, _BUFFER = "gradient of ", "update of ", "buffer"


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The verdict on one row."""

    verdict: str
    dtype: str | None = None
    reason: str | None = None
    """Why not checked, or what differs."""
    first_step: int | None = None
    first_tensor: str | None = None
    """Where it differs first; a tensor's name, `loss` or `gradient norm`."""
    worst: float | None = None
    """Largest distance in noise floors."""
    crashed: bool = False
    """Its own pass began and did not end."""


Distances = dict[int, dict[str, float]]
"""Step -> quantity -> distance to the reference, as a part of the reference's own size."""


def judge(comparison: Comparison, row: Row) -> Numerics:
    """Compare a row's numerics pass with the reference."""
    header = row.numerics.header
    dtype = (header.amp_dtype or "float32") if header else None
    missing = _missing(comparison, row)
    if missing:
        own = row.numerics.status
        crashed = comparison.plan.numerics_steps > 0 and own not in ("ok", "nan", "not run")
        return Numerics(NOT_CHECKED, dtype, missing, crashed=crashed)
    if row.numerics.status == "nan":
        return Numerics(DIFFERS, dtype, row.numerics.end.error if row.numerics.end else None)
    apart = next((r for r in row.numerics.numerics if r.rank_difference > 0), None)
    if apart is not None:
        reason = "ranks hold different parameters: their gradients are not averaged"
        return Numerics(DIFFERS, dtype, reason, apart.step, None)
    reference = comparison.reference
    floor = noise_floor(
        [distances(r, reference) for r in (comparison.baseline.numerics, comparison.other_layout)
         if r.status == "ok"]
    )  # fmt: skip
    return _judge(distances(row.numerics, reference), floor, dtype)


def _missing(comparison: Comparison, row: Row) -> str | None:
    if comparison.plan.numerics_steps == 0:
        return "--numerics_steps 0"
    for what, run in (
        ("the float64 reference", comparison.reference),
        ("the baseline's pass", comparison.baseline.numerics),
        ("its pass", row.numerics),
    ):
        if run.status != "ok" and not (run is row.numerics and run.status == "nan"):
            why = f": {run.end.error}" if run.end and run.end.error else ""
            return f"{what} did not end ({run.status}{why})"
    return None


def _judge(found: Distances, floor: Distances, dtype: str | None) -> Numerics:
    worst, first = 0.0, None
    for step in sorted(found):
        for name, distance in found[step].items():
            if name not in floor.get(step, {}):  # a step that the baseline skipped
                continue
            in_floors = distance / floor[step][name]
            if in_floors > TOLERANCE and (first is None or first[0] == step):
                first = max(first or (step, 0.0, name), (step, in_floors, name))
            worst = max(worst, in_floors)
    if first is None:
        return Numerics(SAME, dtype, worst=worst)
    step, in_floors, name = first
    reason = f"{name} at step {step}, {in_floors:,.0f} times the noise of {dtype}"
    return Numerics(DIFFERS, dtype, reason, step, name, worst)


def noise_floor(of_runs: list[Distances]) -> Distances:
    """Per step and quantity, the largest distance of any run up to that step.

    At least the median of its kind: a tensor that happened to come out exactly, or
    in which no tiny gradient changed its sign, sets no standard.
    """
    floor: Distances = {}
    highest: dict[str, float] = {}
    for step in sorted(of_runs[0]):
        for found in of_runs:
            for name, distance in found[step].items():
                highest[name] = max(highest.get(name, 0.0), distance, _RESOLUTION)
        kinds = _median_by_kind(highest)
        floor[step] = {name: max(highest[name], kinds[_kind(name)]) for name in highest}
    return floor


def _kind(name: str) -> str:
    for kind in (_GRADIENT, _UPDATE):
        if name.startswith(kind):
            return kind
    return name if name in (LOSS, GRAD_NORM) else _BUFFER if "running" in name else "parameter"


def _median_by_kind(highest: Mapping[str, float]) -> dict[str, float]:
    kinds: dict[str, list[float]] = {}
    for name, distance in highest.items():
        kinds.setdefault(_kind(name), []).append(distance)
    return {kind: statistics.median(values) for kind, values in kinds.items()}


def distances(run: Run, reference: Run) -> Distances:
    """Of every step that both have."""
    others = {record.step: record for record in reference.numerics}
    start = others[0].sketches
    return {
        own.step: _distances(own, others[own.step], start)
        for own in run.numerics
        if own.step > 0 and own.step in others
    }


def _distances(
    own: NumericsRecord, other: NumericsRecord, start: Mapping[str, list[float]]
) -> dict[str, float]:
    found = {
        LOSS: _relative(own.loss, other.loss),
        GRAD_NORM: _relative(own.grad_norm, other.grad_norm),
    }
    for name, values in other.sketches.items():
        moved = math.dist(values, start[name])
        away = math.dist(own.sketches[name], values) if name in own.sketches else math.inf
        # A tensor that the reference leaves alone is measured by its own size.
        found[name] = away / (moved or math.hypot(*values) or 1.0)
    for name, values in other.gradients.items():
        away = math.dist(own.gradients[name], values) if name in own.gradients else math.inf
        found[_GRADIENT + name] = away / (math.hypot(*values) or 1.0)
    found |= {_UPDATE + name: error for name, error in own.update_errors.items()}
    return found


def _relative(own: float | None, other: float | None) -> float:
    if own is None or other is None:
        return math.inf
    return abs(own - other) / (abs(other) or 1.0)
