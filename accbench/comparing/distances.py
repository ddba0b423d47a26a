"""Relative distances between an engine's training step and the reference's.

A distance is the L2 norm of the difference of two tensors, divided by the size of what the step
does: by the norm of the gradient, of the parameter's change or of the buffer's change.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accbench.comparing.pieces import in_float64, square_sum
from accbench.comparing.rank_share import RankShare
from accbench.comparing.reference_files import LOSS_SCALE, Reference
from accbench.engines.common import extra_state, optimizer_state
from accbench.engines.common.training_state import Tensors, TrainingState

Extra = dict[str, Any] | None

GRADIENT, SCALE, UPDATE, SECOND_MOMENT = "gradient", "scale", "update", "second moment"
AVERAGE = "average"
# What is compared with the optimizer's formula besides the parameter, and its key in the state.
_COMPARED = {SECOND_MOMENT: "exp_avg_sq", AVERAGE: optimizer_state.AVERAGE}
BUFFER, STATE = "buffer", "state"
# Stands for infinity, which JSON lacks, and for tensors that cannot be compared.
_FURTHEST = 1e30
# A gradient smaller than this fraction of the others' is divided by their size: convolutions
# before BatchNorm have biases whose gradient is zero except for rounding.
_NEGLIGIBLE = 1e-4
# The error that an engine which stores a buffer in another form may have after loading it.
_LOADED = 2.0**-16
# XLA flushes float32's denormal numbers to zero, also between operations.
_AS_ZERO = 4 * torch.finfo(torch.float32).tiny
# A change by less than this fraction of a tensor is mostly rounding in float32.
_HELD = 2.0**-14


def bounded(distance: float) -> float:
    """Clamp a distance to finite numbers, and turn NaN into the largest one."""
    if math.isnan(distance):
        return _FURTHEST
    return max(-_FURTHEST, min(_FURTHEST, distance))


def relative(actual: float, expected: float) -> float:
    """Return the difference of two numbers as a fraction of `expected`."""
    return bounded(abs(actual - expected) / (abs(expected) or 1.0))


def of_update(actual: torch.Tensor | None, before: torch.Tensor, expected: torch.Tensor) -> float:
    """Return a tensor's distance after a step, as a fraction of the change that was expected."""
    return _distance(actual, expected) / (_difference(expected, before) or 1.0)


def of_weights(actual: Tensors, start: Tensors, expected: Tensors) -> dict[str, float]:
    """Compare the weights after many steps, all parameters together.

    Returns:
        `parameters` is their distance as a fraction of the path from `start` to `expected`; `way`
        is how much longer the engine's path is than the expected one, as a fraction of that.
    """
    squared_error = squared_path = squared_expected_path = 0.0
    for name, first in start.items():
        squared_error += _distance(actual.get(name), expected[name]) ** 2
        squared_expected_path += _difference(expected[name], first) ** 2
        squared_path += _distance(actual.get(name), first) ** 2
    return {
        "parameters": math.sqrt(squared_error / (squared_expected_path or 1.0)),
        "way": (
            math.sqrt(squared_path / squared_expected_path) - 1
            if squared_expected_path
            else squared_path
        ),
    }


def _norm(tensor: torch.Tensor) -> float:
    return math.sqrt(sum(square_sum(values) for (values,) in in_float64([tensor])))


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors of one shape."""
    return math.sqrt(sum(square_sum(x - y) for x, y in in_float64([a, b])))


def _distance(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    if actual is None or actual.shape != expected.shape:
        return _FURTHEST
    return bounded(_difference(actual, expected))


def of_start(actual: TrainingState, expected: TrainingState) -> dict[str, float]:
    """Compare the weights that an engine starts from, and their number; tied ones count once."""
    distances = {"tensors": float(len(actual.model.keys() ^ expected.model.keys()))}
    for name, tensor in expected.model.items():
        distance = _distance(actual.model.get(name), tensor)
        distances[f"{STATE} {name}"] = distance / (_norm(tensor) or 1.0)
    return distances


def not_loaded(actual: TrainingState, loaded: TrainingState) -> str | None:
    """Describe the first value that differs from what was loaded; return None if all agree."""
    pairs = [(name, tensor, actual.model.get(name)) for name, tensor in loaded.model.items()]
    for name, tensors in loaded.optimizer.items():
        of_engine = actual.optimizer.get(name, {})
        pairs += [
            (f"{key} of {name}", tensor, of_engine.get(key)) for key, tensor in tensors.items()
        ]
    for name, tensor, engine_tensor in pairs:
        if engine_tensor is not None and torch.equal(engine_tensor, tensor):
            continue
        if not _distance(engine_tensor, tensor) <= _LOADED * _norm(tensor):
            return f"{name} is not what was loaded"
    if actual.scaler and actual.scaler != loaded.scaler:
        return f"the loss scale is {actual.scaler}, not {loaded.scaler}"
    return None


def of_step(
    actual: TrainingState, reference: Reference, share: RankShare | None = None
) -> dict[str, float]:
    """Compare one step from the reference's state: gradients, update, buffers and counts.

    Args:
        actual: the state after the step.
        reference: has read the step.
        share: the parameters that this rank measures, where `actual` has the same of all of them on
            all ranks, which call this. Updates of the others are 0 in the result. None: all.
    """
    gradients = GradientDistances(reference.gradients, share)
    updates = _of_updates(actual, reference, gradients, share)
    return {
        **gradients.result(),
        **updates,
        **of_buffers(actual.model, reference.buffers, reference.buffers_after),
        **of_extra(actual.extra, reference.extra, reference.extra_after),
        **_of_counts(actual, reference),
    }


def of_draw(
    actual: TrainingState, reference: Reference, share: RankShare | None = None
) -> dict[str, float]:
    """Compare a step from perturbed weights: gradients and buffers, without the optimizer."""
    return {
        **_of_engine_gradients(actual, reference, share),
        **of_buffers(actual.model, reference.buffers, reference.buffers_after),
    }


def _of_engine_gradients(
    actual: TrainingState, reference: Reference, share: RankShare | None
) -> dict[str, float]:
    distances = GradientDistances(reference.gradients, share)
    for name, expected in reference.gradients.items():
        if name in actual.optimizer and (share is None or share.has(name)):
            for piece, expected_piece in _engine_gradient(actual, reference, name, [expected]):
                distances.add(name, piece, expected_piece)
    return distances.result()


def _engine_gradient(
    actual: TrainingState, reference: Reference, name: str, beside: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Yield the pieces of the gradient that the engine used, and those of tensors beside it."""
    rule, parameter = reference.rule, reference.weights.parameters[name]
    key, decay = rule.moment_key, rule.decay(parameter)
    moments = [actual.optimizer[name][key], reference.weights.state[name][key]]
    for after, before, p, *others in in_float64([*moments, parameter, *beside]):
        yield [rule.gradient_piece(after, before, p, decay), *others]


def of_gradients(gradients: Tensors, all_expected: Tensors) -> dict[str, float]:
    """Compare each gradient's direction and scale, and those of all gradients together."""
    distances = GradientDistances(all_expected)
    for name, expected in all_expected.items():
        if name in gradients:
            for piece, expected_piece in in_float64([gradients[name], expected]):
                distances.add(name, piece, expected_piece)
    return distances.result()


class GradientDistances:
    """Distances of gradients from those that are expected, of which the pieces come one by one.

    With a share, each rank adds the pieces of its own, and all ranks ask for the result.
    """

    def __init__(self, all_expected: Tensors, share: RankShare | None = None) -> None:
        self._share = share
        self._sizes = {name: expected.numel() for name, expected in all_expected.items()}
        self._squares = {name: _norm(expected) ** 2 for name, expected in all_expected.items()}
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, gradient: torch.Tensor, expected: torch.Tensor) -> None:
        """Add a piece of a gradient and of the one that is expected, both (N,) in float64."""
        squared_distance, product = self._sums.get(name, (0.0, 0.0))
        squared_distance += square_sum(gradient - expected)
        self._sums[name] = squared_distance, product + float((gradient * expected).sum())

    def result(self) -> dict[str, float]:
        """Return each gradient's distance and scale, and those of all gradients together.

        A gradient of which no piece has come counts as missing.
        """
        distances = {}
        sums = self._sums if self._share is None else self._share.join(self._sums)
        total, num_values = sum(self._squares.values()), sum(self._sizes.values())
        product = squared_error = 0.0
        for name, square in self._squares.items():
            if name not in sums and self._sizes[name]:
                squared_error += square
                distances[f"{GRADIENT} of {name}"] = _FURTHEST
                continue
            squared_distance, own_product = sums.get(name, (0.0, 0.0))
            typical_size = math.sqrt(total * self._sizes[name] / (num_values or 1))
            size = max(math.sqrt(square), _NEGLIGIBLE * typical_size) or 1.0
            distances[f"{GRADIENT} of {name}"] = math.sqrt(squared_distance) / size
            if math.sqrt(square) == size:
                distances[f"{SCALE} of {name}"] = own_product / square - 1
            product += own_product
            squared_error += squared_distance
        distances[GRADIENT] = math.sqrt(squared_error / (total or 1.0))
        distances[SCALE] = product / total - 1 if total else 0.0
        return distances


def _of_updates(
    actual: TrainingState, reference: Reference, gradients: GradientDistances,
    share: RankShare | None,
) -> dict[str, float]:  # fmt: skip
    """Compare parameters with the optimizer's formula, applied to the engine's gradients.

    The gradients' own distances are added to `gradients` on the way.
    """
    distances: dict[str, float] = {}
    before, lr = reference.weights, reference.rule.task.lr
    for name, parameter in before.parameters.items():
        is_trained = name in reference.gradients and name in actual.optimizer
        if share is not None and not share.has(name):
            kinds = _kinds(reference, name) if is_trained else [UPDATE]
            distances |= {f"{kind} of {name}": 0.0 for kind in kinds}
        elif is_trained:
            distances |= _of_update(name, actual, reference, gradients)
        else:  # it should not have moved; a step is about lr an element
            size = lr * math.sqrt(parameter.numel()) or 1.0
            distances[f"{UPDATE} of {name}"] = _distance(actual.model.get(name), parameter) / size
    return distances


def _of_update(
    name: str, actual: TrainingState, reference: Reference, gradients: GradientDistances
) -> dict[str, float]:
    """Compare a parameter, its second moment and its average with the optimizer's formula."""
    rule, before = reference.rule, reference.weights
    parameter, state = before.parameters[name], before.state[name]
    keys = {kind: _COMPARED[kind] for kind in _kinds(reference, name) if kind != UPDATE}
    after = {UPDATE: actual.model.get(name)}
    after |= {kind: actual.optimizer[name].get(key) for kind, key in keys.items()}
    fitting = {k: t for k, t in after.items() if t is not None and t.shape == parameter.shape}
    errors, changes, sizes = (dict.fromkeys(after, 0.0) for _ in range(3))
    beside = [reference.gradients[name], parameter, *state.values(), *fitting.values()]
    for g, expected_g, p, *others in _engine_gradient(actual, reference, name, beside):
        gradients.add(name, g, expected_g)
        p_state = dict(zip(state, others[: len(state)], strict=True))
        values = dict(zip(fitting, others[len(state) :], strict=True))
        num_steps = before.num_steps[name] + 1
        moved, moved_state = rule.step_piece(p, p_state, g, num_steps, rule.decay(parameter))
        expected = {UPDATE: (moved, p)}
        expected |= {kind: (moved_state[key], p_state[key]) for kind, key in keys.items()}
        for kind, (value, value_before) in expected.items():
            changes[kind] += square_sum(value - value_before)
            sizes[kind] += square_sum(value)
            if kind in values:
                errors[kind] += square_sum(values[kind] - value)
    distances = {}
    for kind in after:
        distance = bounded(math.sqrt(errors[kind])) if kind in fitting else _FURTHEST
        changed = math.sqrt(changes[kind])
        if kind == AVERAGE:  # its change may be too small for float32 to represent
            changed += _HELD * math.sqrt(sizes[kind])
        if kind != UPDATE:
            # Denormal second moments come from gradients of about 1e-19, and AdamW adds an
            # epsilon of 1e-8 to their root.
            distance = max(0.0, distance - _AS_ZERO * math.sqrt(parameter.numel()))
        distances[f"{kind} of {name}"] = distance / (changed or 1.0)
    return distances


def _kinds(reference: Reference, name: str) -> list[str]:
    """Return what of a parameter is compared with the optimizer's formula."""
    state = reference.weights.state[name]
    return [UPDATE, *(kind for kind, key in _COMPARED.items() if key in state)]


def of_buffers(actual: Tensors, before: Tensors, after: Tensors) -> dict[str, float]:
    """Compare each buffer in `after`."""
    distances = {}
    for name, expected in after.items():
        # The distance of a buffer that the reference does not change is relative to its size.
        size = _difference(expected, before[name]) or _norm(expected) or 1.0
        distances[f"{BUFFER} {name}"] = _distance(actual.get(name), expected) / size
    return distances


def of_extra(actual: Extra, before: Extra, after: Extra) -> dict[str, float]:
    """Compare modules' extra state: numbers as buffers are, all else for equality."""
    distances = {}
    for key, expected in (after or {}).items():
        others, values = extra_state.split_numbers(expected)
        actual_others, actual_values = extra_state.split_numbers((actual or {}).get(key))
        _, earlier = extra_state.split_numbers((before or {}).get(key))
        distance = _distance(actual_values, values) if actual_others == others else _FURTHEST
        moved = _norm(values - earlier) if values.shape == earlier.shape else 0.0
        distances[f"{BUFFER} {key}"] = distance / (moved or _norm(values) or 1.0)
    return distances


def _of_counts(actual: TrainingState, reference: Reference) -> dict[str, float]:
    steps = {
        name: float(actual.optimizer.get(name, {}).get("step", torch.tensor(-1.0)))
        for name in reference.gradients
    }
    wrong = [abs(n - reference.weights_after.num_steps[name]) for name, n in steps.items()]
    return {"applied steps": max(wrong, default=0.0), **of_scaler(actual)}


def of_scaler(actual: TrainingState) -> dict[str, float]:
    """Compare the loss scale after one step; without one there is nothing to compare."""
    if not actual.scaler:
        return {}
    return {
        "loss scale": abs(actual.scaler["scale"] / LOSS_SCALE - 1),
        "growth tracker": abs(actual.scaler["growth_tracker"] - 1),
    }


def of_skipped_step(actual: TrainingState, before: TrainingState) -> dict[str, float]:
    """Return how far a step that had to be skipped changed weights, step counts and loss scale."""
    parameters = before.optimizer.keys()
    moved = max((_distance(actual.model.get(n), before.model[n]) for n in parameters), default=0.0)
    counted = max(
        (abs(float(actual.optimizer[n]["step"] - before.optimizer[n]["step"])) for n in parameters),
        default=0.0,
    )
    halved = abs(actual.scaler.get("scale", 0.0) / before.scaler["scale"] - 0.5)
    return {"parameters": moved, "applied steps": counted, "loss scale": halved}


def of_free_run(actual: TrainingState, reference: Reference) -> dict[str, float]:
    """Compare the weights after all steps, all parameters together, and the count of steps.

    `way` is how much longer the engine's path through the weights is than the reference's, as a
    fraction of that: rounding changes the direction of some weights, and the length of the whole
    path far less.
    """
    start, after = reference.start.parameters, reference.weights_after.parameters
    steps = [abs(d) for n, d in _of_counts(actual, reference).items() if n == "applied steps"]
    return {**of_weights(actual.model, start, after), "applied steps": steps[0]}
