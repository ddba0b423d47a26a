"""How far an engine's step is from the reference's, in numbers without units.

Distances are L2 norms over a tensor, as a part of what the step itself amounts to: of the
gradient, of the parameter's way, of the buffer's.
"""

import math
from typing import Any

import torch

from accbench.comparing.reference import LOSS_SCALE, Reference
from accbench.engines.common import extra_state, optimizer_state
from accbench.engines.common.complex_numbers import wide
from accbench.engines.common.training_state import Tensors, TrainingState

Extra = dict[str, Any] | None

GRADIENT, SCALE, UPDATE, SECOND_MOMENT = "gradient", "scale", "update", "second moment"
AVERAGE = "average"
BUFFER, STATE = "buffer", "state"
# In place of infinity, which JSON does not have, and of what cannot be compared.
_FURTHEST = 1e30
# A gradient smaller than this part of the others' is measured by their size: convolutions
# in front of BatchNorm have biases whose gradient is zero but for rounding.
_NEGLIGIBLE = 1e-4
# What an engine that keeps a buffer in another form may be off by after loading it.
_LOADED = 2.0**-16
# XLA takes what is too small for a normal number of float32 for zero, also between operations.
_AS_ZERO = 4 * torch.finfo(torch.float32).tiny
# A change by less than this part of a tensor is mostly rounding in float32.
_HELD = 2.0**-14


def bounded(distance: float) -> float:
    """Finite."""
    if math.isnan(distance):
        return _FURTHEST
    return max(-_FURTHEST, min(_FURTHEST, distance))


def relative(own: float, expected: float) -> float:
    """As a part of `expected`."""
    return bounded(abs(own - expected) / (abs(expected) or 1.0))


def of_update(own: torch.Tensor | None, before: torch.Tensor, expected: torch.Tensor) -> float:
    """Of what a step has made of a tensor, as a part of what it should have changed."""
    return _away(own, expected) / (_norm(wide(expected) - wide(before)) or 1.0)


def of_weights(own: Tensors, start: Tensors, expected: Tensors) -> dict[str, float]:
    """Of weights after many steps, all together, and how much further they went."""
    away = moved = own_moved = 0.0
    for name, begun in start.items():
        away += _away(own.get(name), expected[name]) ** 2
        moved += _norm(wide(expected[name]) - wide(begun)) ** 2
        own_moved += _away(own.get(name), begun) ** 2
    return {
        "parameters": math.sqrt(away / (moved or 1.0)),
        "way": math.sqrt(own_moved / moved) - 1 if moved else own_moved,
    }


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(wide(tensor)))


def _away(own: torch.Tensor | None, expected: torch.Tensor) -> float:
    if own is None or own.shape != expected.shape:
        return _FURTHEST
    return _norm(wide(own) - wide(expected))


def of_start(own: TrainingState, expected: TrainingState) -> dict[str, float]:
    """Of the weights that an engine begins with, and of their number: tied ones count once."""
    found = {"tensors": float(len(own.model.keys() ^ expected.model.keys()))}
    for name, tensor in expected.model.items():
        found[f"{STATE} {name}"] = _away(own.model.get(name), tensor) / (_norm(tensor) or 1.0)
    return found


def not_loaded(own: TrainingState, loaded: TrainingState) -> str | None:
    """What is not as it was loaded; None if all is."""
    pairs = [(name, tensor, own.model.get(name)) for name, tensor in loaded.model.items()]
    for name, tensors in loaded.optimizer.items():
        of_own = own.optimizer.get(name, {})
        pairs += [(f"{key} of {name}", tensor, of_own.get(key)) for key, tensor in tensors.items()]
    for name, tensor, of_engine in pairs:
        if not _away(of_engine, tensor) <= _LOADED * _norm(tensor):
            return f"{name} is not what was loaded"
    if own.scaler and own.scaler != loaded.scaler:
        return f"the loss scale is {own.scaler}, not {loaded.scaler}"
    return None


def of_step(own: TrainingState, against: Reference) -> dict[str, float]:
    """Of one step from the reference's state: gradients, update, buffers and counts."""
    return {
        **of_gradients(_own_gradients(own, against), against.gradients),
        **_of_updates(own, against),
        **of_buffers(own.model, against.buffers, against.buffers_after),
        **of_extra(own.extra, against.extra, against.extra_after),
        **_of_counts(own, against),
    }


def of_draw(own: TrainingState, against: Reference) -> dict[str, float]:
    """Of a step from weights a little off: what the network does, not the optimizer."""
    return {
        **of_gradients(_own_gradients(own, against), against.gradients),
        **of_buffers(own.model, against.buffers, against.buffers_after),
    }


def _own_gradients(own: TrainingState, against: Reference) -> Tensors:
    return {
        name: against.rule.gradient(
            own.optimizer[name], against.weights.state[name], against.weights.parameters[name]
        )
        for name in against.gradients
        if name in own.optimizer
    }


def of_gradients(gradients: Tensors, all_expected: Tensors) -> dict[str, float]:
    """Of each gradient, and of all together."""
    found = {}
    squares = {name: float(wide(g).square().sum()) for name, g in all_expected.items()}
    total, num_values = sum(squares.values()), sum(g.numel() for g in all_expected.values())
    product = away = 0.0
    for name, expected in all_expected.items():
        gradient = gradients.get(name)
        if gradient is None:
            away += squares[name]
            found[f"{GRADIENT} of {name}"] = _FURTHEST
            continue
        distance = _norm(wide(gradient) - wide(expected))
        of_tensor = float((wide(gradient) * wide(expected)).sum())
        usual = math.sqrt(total * expected.numel() / num_values)
        size = max(math.sqrt(squares[name]), _NEGLIGIBLE * usual) or 1.0
        found[f"{GRADIENT} of {name}"] = distance / size
        if math.sqrt(squares[name]) == size:
            found[f"{SCALE} of {name}"] = of_tensor / squares[name] - 1
        product += of_tensor
        away += distance**2
    found[GRADIENT] = math.sqrt(away / (total or 1.0))
    found[SCALE] = product / total - 1 if total else 0.0
    return found


def _of_updates(own: TrainingState, against: Reference) -> dict[str, float]:
    """From where the optimizer should have put a parameter, given the gradients that it used."""
    found = {}
    gradients = _own_gradients(own, against)
    before, lr = against.weights, against.rule.task.lr
    for name, parameter in before.parameters.items():
        if name not in gradients:  # it should not have moved; a step is about lr an element
            size = lr * math.sqrt(parameter.numel()) or 1.0
            found[f"{UPDATE} of {name}"] = _away(own.model.get(name), parameter) / size
            continue
        expected, after = against.rule.step(
            parameter, before.state[name], gradients[name], before.num_steps[name] + 1
        )
        moved = _norm(wide(expected) - wide(parameter)) or 1.0
        found[f"{UPDATE} of {name}"] = _away(own.model.get(name), expected) / moved
        for kind, key in ((SECOND_MOMENT, "exp_avg_sq"), (AVERAGE, optimizer_state.AVERAGE)):
            if key in after:
                changed = _norm(wide(after[key]) - wide(before.state[name][key]))
                if kind == AVERAGE:  # which moves by less than float32 may be able to hold
                    changed += _HELD * _norm(after[key])
                distance = _away(own.optimizer[name].get(key), after[key])
                # Squares of gradients of 1e-19, which AdamW adds an epsilon of 1e-8 to the root of.
                distance = max(0.0, distance - _AS_ZERO * math.sqrt(after[key].numel()))
                found[f"{kind} of {name}"] = distance / (changed or 1.0)
    return found


def of_buffers(own: Tensors, before: Tensors, after: Tensors) -> dict[str, float]:
    """Of each buffer in `after`."""
    found = {}
    for name, expected in after.items():
        # One that the reference leaves alone is measured by its own size.
        size = _norm(wide(expected) - wide(before[name])) or _norm(expected) or 1.0
        found[f"{BUFFER} {name}"] = _away(own.get(name), expected) / size
    return found


def of_extra(own: Extra, before: Extra, after: Extra) -> dict[str, float]:
    """Of modules' extra state: numbers as buffers, all else must be the same."""
    found = {}
    for key, expected in (after or {}).items():
        others, values = extra_state.split_numbers(expected)
        own_others, own_values = extra_state.split_numbers((own or {}).get(key))
        _, earlier = extra_state.split_numbers((before or {}).get(key))
        away = _away(own_values, values) if own_others == others else _FURTHEST
        moved = _norm(values - earlier) if values.shape == earlier.shape else 0.0
        found[f"{BUFFER} {key}"] = away / (moved or _norm(values) or 1.0)
    return found


def _of_counts(own: TrainingState, against: Reference) -> dict[str, float]:
    steps = {
        name: float(own.optimizer.get(name, {}).get("step", torch.tensor(-1.0)))
        for name in against.gradients
    }
    wrong = [abs(n - against.weights_after.num_steps[name]) for name, n in steps.items()]
    counts = {"applied steps": max(wrong, default=0.0)}
    if own.scaler:
        counts["loss scale"] = abs(own.scaler["scale"] / LOSS_SCALE - 1)
        counts["growth tracker"] = abs(own.scaler["growth_tracker"] - 1)
    return counts


def of_skipped_step(own: TrainingState, before: TrainingState) -> dict[str, float]:
    """Of a step that should have been left out."""
    parameters = before.optimizer.keys()
    moved = max((_away(own.model.get(n), before.model[n]) for n in parameters), default=0.0)
    counted = max(
        (abs(float(own.optimizer[n]["step"] - before.optimizer[n]["step"])) for n in parameters),
        default=0.0,
    )
    halved = abs(own.scaler.get("scale", 0.0) / before.scaler["scale"] - 0.5)
    return {"parameters": moved, "applied steps": counted, "loss scale": halved}


def of_free_run(own: TrainingState, against: Reference) -> dict[str, float]:
    """Of the weights after all steps: all parameters together, and the count of steps.

    `way` is how much further they went than the reference's, as a part of that: rounding
    turns the way of some weights, and the length of all far less.
    """
    start, after = against.start.parameters, against.weights_after.parameters
    steps = [abs(d) for n, d in _of_counts(own, against).items() if n == "applied steps"]
    return {**of_weights(own.model, start, after), "applied steps": steps[0]}
