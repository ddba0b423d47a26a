"""Relative distances between an engine's training step and the reference's.

A distance is the L2 norm of the difference of two tensors, divided by the size of what the step
does: by the norm of the gradient, of the parameter's change or of the buffer's change.
"""

import math
from typing import Any

import torch

from accbench.comparing.reference_pass import LOSS_SCALE, Reference
from accbench.distributed.complex_numbers import wide
from accbench.engines.common import extra_state, optimizer_state
from accbench.engines.common.training_state import Tensors, TrainingState

Extra = dict[str, Any] | None

GRADIENT, SCALE, UPDATE, SECOND_MOMENT = "gradient", "scale", "update", "second moment"
AVERAGE = "average"
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
    return _distance(actual, expected) / (_norm(wide(expected) - wide(before)) or 1.0)


def of_weights(actual: Tensors, start: Tensors, expected: Tensors) -> dict[str, float]:
    """Compare the weights after many steps, all parameters together.

    Returns:
        `parameters` is their distance as a fraction of the path from `start` to `expected`; `way`
        is how much longer the engine's path is than the expected one, as a fraction of that.
    """
    squared_error = squared_path = squared_expected_path = 0.0
    for name, first in start.items():
        squared_error += _distance(actual.get(name), expected[name]) ** 2
        squared_expected_path += _norm(wide(expected[name]) - wide(first)) ** 2
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
    return float(torch.linalg.vector_norm(wide(tensor)))


def _distance(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    if actual is None or actual.shape != expected.shape:
        return _FURTHEST
    return _norm(wide(actual) - wide(expected))


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
        if not _distance(engine_tensor, tensor) <= _LOADED * _norm(tensor):
            return f"{name} is not what was loaded"
    if actual.scaler and actual.scaler != loaded.scaler:
        return f"the loss scale is {actual.scaler}, not {loaded.scaler}"
    return None


def of_step(actual: TrainingState, reference: Reference) -> dict[str, float]:
    """Compare one step from the reference's state: gradients, update, buffers and counts."""
    return {
        **of_gradients(_engine_gradients(actual, reference), reference.gradients),
        **_of_updates(actual, reference),
        **of_buffers(actual.model, reference.buffers, reference.buffers_after),
        **of_extra(actual.extra, reference.extra, reference.extra_after),
        **_of_counts(actual, reference),
    }


def of_draw(actual: TrainingState, reference: Reference) -> dict[str, float]:
    """Compare a step from perturbed weights: gradients and buffers, without the optimizer."""
    return {
        **of_gradients(_engine_gradients(actual, reference), reference.gradients),
        **of_buffers(actual.model, reference.buffers, reference.buffers_after),
    }


def _engine_gradients(actual: TrainingState, reference: Reference) -> Tensors:
    return {
        name: reference.rule.gradient(
            actual.optimizer[name],
            reference.weights.state[name],
            reference.weights.parameters[name],
        )
        for name in reference.gradients
        if name in actual.optimizer
    }


def of_gradients(gradients: Tensors, all_expected: Tensors) -> dict[str, float]:
    """Compare each gradient's direction and scale, and those of all gradients together."""
    distances = {}
    squares = {name: float(wide(g).square().sum()) for name, g in all_expected.items()}
    total, num_values = sum(squares.values()), sum(g.numel() for g in all_expected.values())
    product = squared_error = 0.0
    for name, expected in all_expected.items():
        gradient = gradients.get(name)
        if gradient is None:
            squared_error += squares[name]
            distances[f"{GRADIENT} of {name}"] = _FURTHEST
            continue
        distance = _norm(wide(gradient) - wide(expected))
        inner_product = float((wide(gradient) * wide(expected)).sum())
        typical_size = math.sqrt(total * expected.numel() / num_values)
        size = max(math.sqrt(squares[name]), _NEGLIGIBLE * typical_size) or 1.0
        distances[f"{GRADIENT} of {name}"] = distance / size
        if math.sqrt(squares[name]) == size:
            distances[f"{SCALE} of {name}"] = inner_product / squares[name] - 1
        product += inner_product
        squared_error += distance**2
    distances[GRADIENT] = math.sqrt(squared_error / (total or 1.0))
    distances[SCALE] = product / total - 1 if total else 0.0
    return distances


def _of_updates(actual: TrainingState, reference: Reference) -> dict[str, float]:
    """Compare parameters with the optimizer's formula, applied to the engine's gradients."""
    distances = {}
    gradients = _engine_gradients(actual, reference)
    before, lr = reference.weights, reference.rule.task.lr
    for name, parameter in before.parameters.items():
        if name not in gradients:  # it should not have moved; a step is about lr an element
            size = lr * math.sqrt(parameter.numel()) or 1.0
            distances[f"{UPDATE} of {name}"] = _distance(actual.model.get(name), parameter) / size
            continue
        expected, after = reference.rule.step(
            parameter, before.state[name], gradients[name], before.num_steps[name] + 1
        )
        moved = _norm(wide(expected) - wide(parameter)) or 1.0
        distances[f"{UPDATE} of {name}"] = _distance(actual.model.get(name), expected) / moved
        for kind, key in ((SECOND_MOMENT, "exp_avg_sq"), (AVERAGE, optimizer_state.AVERAGE)):
            if key in after:
                changed = _norm(wide(after[key]) - wide(before.state[name][key]))
                if kind == AVERAGE:  # its change may be too small for float32 to represent
                    changed += _HELD * _norm(after[key])
                distance = _distance(actual.optimizer[name].get(key), after[key])
                # Denormal second moments come from gradients of about 1e-19, and AdamW adds an
                # epsilon of 1e-8 to their root.
                distance = max(0.0, distance - _AS_ZERO * math.sqrt(after[key].numel()))
                distances[f"{kind} of {name}"] = distance / (changed or 1.0)
    return distances


def of_buffers(actual: Tensors, before: Tensors, after: Tensors) -> dict[str, float]:
    """Compare each buffer in `after`."""
    distances = {}
    for name, expected in after.items():
        # The distance of a buffer that the reference does not change is relative to its size.
        size = _norm(wide(expected) - wide(before[name])) or _norm(expected) or 1.0
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
    counts = {"applied steps": max(wrong, default=0.0)}
    if actual.scaler:
        counts["loss scale"] = abs(actual.scaler["scale"] / LOSS_SCALE - 1)
        counts["growth tracker"] = abs(actual.scaler["growth_tracker"] - 1)
    return counts


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
