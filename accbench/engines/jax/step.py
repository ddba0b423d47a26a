"""The whole training step as one function of JAX arrays, around a captured graph."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from accbench.config import plugins
from accbench.engines.common import optimizer_state
from accbench.engines.jax import updates
from accbench.engines.jax.capture import Captured
from accbench.engines.jax.lowering import Rules, run_graph
from accbench.engines.jax.workers import Axis, Workers

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step is made of, apart from its graph."""

    optimizer: str
    groups: list[dict[str, Any]]
    """Settings of the optimizer's groups, those that stay as they are."""
    group_of: list[int]
    """Parameter, by its place among the model's -> its group."""
    num_parts: int
    """Gradients of so many parts of a batch are added up."""
    num_in_batch: int
    """Tensors of a batch; behind them come those of `beside`."""
    num_beside: list[int]
    """Of each source, tensors for all parts."""
    clip_norm: float | None
    ema_decay: float | None
    skips: bool
    """Leave out steps whose gradients are not finite, and what they made of buffers."""
    scaling: dict[str, Any] | None
    """Of the loss scale: growth, backoff, interval; None where there is none."""
    axes: list[Axis]
    """Parameter, by its place among the model's -> how it is parted between the workers."""
    waits: bool
    """Begin no update before all gradients are reduced."""
    rules: Rules
    """How the graph is lowered."""


def build(captured: Captured, plan: Plan, workers: Workers) -> Callable[..., Any]:
    """The function of a step.

    It takes, and gives back first, `state`: parameters (in the model's order), what the optimizer
    keeps of each (key -> arrays in that order), counts (parameters,) float32 of steps taken, and
    scale and tracker where the loss is scaled; and `own`: the model's buffers. Then `rates` (lr,
    (groups,) float32), and `given`: inputs (the batch's and those beside it) and random
    ((2,) uint32: seed, number of the step). The loss comes last, float32 ().
    """
    axes = [plan.axes[place] for place in captured.trained]

    def sums(of_parts: Any) -> Any:
        return workers.sums(of_parts, axes)

    def step(state: Tree, own: Tree, rates: Tree, given: Tree) -> tuple[Tree, Tree, Any]:
        scale = state["scale"] if plan.scaling else jnp.float32(1)
        pairs = zip(state["parameters"], plan.axes, strict=True)
        parameters = [workers.whole(array, axis) for array, axis in pairs]
        loss, gradients, buffers = _gradients(captured, plan, parameters, own, given, scale)
        gradients = workers.mean_parts([_parts_of(g) for g in gradients], axes)
        if plan.waits:
            gradients = updates.all_there(gradients)
        overflow = jnp.bool_(False)
        if plan.scaling:
            gradients = [g * (1 / scale).astype(g.dtype) for g in gradients]
        if plan.scaling or plan.skips:
            overflow = workers.any_of(updates.nonfinite(gradients), axes)
        if plan.clip_norm is not None:
            gradients = updates.clipped(gradients, plan.clip_norm, sums)
        if plan.skips:
            changes = zip(own["buffers"], buffers, strict=True)
            buffers = [jnp.where(overflow, before, after) for before, after in changes]
        state = _updated(captured, plan, state, rates, gradients, overflow)
        if plan.scaling:
            state["scale"], state["tracker"] = updates.next_scale(
                state["scale"], state["tracker"], overflow, **plan.scaling
            )
        return state, {"buffers": buffers}, loss

    return step


def _gradients(
    captured: Captured, plan: Plan, parameters: list[Any], own: Tree, given: Tree, scale: Any
) -> tuple[Any, list[Any], list[Any]]:
    """(loss, gradients of the scaled loss, buffers) of the batch, part after part."""
    seed, number = given["random"]
    key = jax.random.fold_in(jax.random.key(seed), number)

    def of_part(buffers: list[Any], part: list[Any], key: Any) -> tuple[Any, list[Any], list[Any]]:
        factor = scale / plan.num_parts
        inputs = captured.inputs(parameters, buffers, factor, *part)
        values = run_graph(captured.graph, inputs, key, plan.rules)
        changed, loss, gradients = captured.outputs(values)
        buffers = list(buffers)
        for place, value in zip(captured.mutated, changed, strict=True):
            buffers[place] = value.astype(buffers[place].dtype)
        return loss.astype(jnp.float32) / plan.num_parts, gradients, buffers

    if plan.num_parts == 1:
        return of_part(own["buffers"], given["inputs"], key)
    parts = _parts(captured, plan, given["inputs"])

    def one(carried: Any, given: Any) -> tuple[Any, None]:
        sums, gradients, buffers = carried
        part, number = given
        loss, more, buffers = of_part(buffers, part, jax.random.fold_in(key, number))
        added = [a + b for a, b in zip(gradients, more, strict=True)]
        return (sums + loss, added, buffers), None

    zeros = [jnp.zeros_like(parameters[place]) for place in captured.trained]
    begin = jnp.float32(0), zeros, own["buffers"]
    carried, _ = jax.lax.scan(one, begin, (parts, jnp.arange(plan.num_parts)))
    return carried


def _parts(captured: Captured, plan: Plan, inputs: list[Any]) -> list[Any]:
    """The graph's inputs for each part of a batch, one part after the other along a first axis."""
    batch, others = inputs[: plan.num_in_batch], inputs[plan.num_in_batch :]
    parts = [array.reshape(plan.num_parts, -1, *array.shape[1:]) for array in batch]
    for number, reads in zip(plan.num_beside, captured.reads, strict=True):
        source, others = others[:number], others[number:]
        # Every forward pass reads on where the one before has stopped.
        for place in range(number):
            of_parts = [source[(place + part * reads) % number] for part in range(plan.num_parts)]
            parts.append(jnp.stack(of_parts))
    return parts


def _parts_of(array: Any) -> Any:
    """Complex numbers as two real ones each, (..., 2), which is what optimizers take them for."""
    return jnp.stack([array.real, array.imag], -1) if jnp.iscomplexobj(array) else array


def _like(array: Any, parts: Any) -> Any:
    """Of `_parts_of(array)` what stands for `array`."""
    if not jnp.iscomplexobj(array):
        return parts
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def _updated(
    captured: Captured, plan: Plan, state: Tree, rates: Tree, gradients: list[Any], overflow: Any
) -> Tree:
    """The state after the optimizer's step; as it was where gradients overflowed."""
    state = {key: list(v) if isinstance(v, list) else v for key, v in state.items()}
    may_skip = plan.scaling is not None or plan.skips
    trained = jnp.asarray(captured.trained)
    taken = jnp.where(overflow, 0.0, 1.0) if may_skip else 1.0
    counts = state["counts"].at[trained].add(taken)
    optimizer = plugins.load("optimizers", plan.optimizer)
    keys = optimizer.state_keys
    of_trained = dict(zip(captured.trained, gradients, strict=True))
    update_group = optimizer.jax_group_update()
    if plan.rules.torch_updates and update_group is not None and not may_skip:
        _update_by_torch(plan, update_group, keys, state, rates, of_trained, counts)
    for place, gradient in of_trained.items():
        group, parameter = plan.group_of[place], state["parameters"][place]
        before = {key: state[key][place] for key in keys}
        moved, after = optimizer.update(
            jnp, plan.groups[group], rates["lr"][group], _parts_of(parameter), gradient,
            {key: _parts_of(array) for key, array in before.items()}, counts[place],
        )  # fmt: skip
        moved, after = _like(parameter, moved), {k: _like(before[k], a) for k, a in after.items()}
        pairs = {"parameters": (parameter, moved)} | {k: (before[k], after[k]) for k in keys}
        for key, (old, new) in pairs.items():
            state[key][place] = jnp.where(overflow, old, new) if may_skip else new
    if plan.ema_decay:
        pairs_of_averages = zip(state[optimizer_state.AVERAGE], state["parameters"], strict=True)
        state[optimizer_state.AVERAGE] = [
            a + (1 - plan.ema_decay) * (p - a) for a, p in pairs_of_averages
        ]
    return {**state, "counts": counts}


def _update_by_torch(
    plan: Plan, update_group: Any, keys: Sequence[str], state: Tree, rates: Tree,
    gradients: dict[int, Any], counts: Any,
) -> None:  # fmt: skip
    """Take a group's float32 parameters together out of `gradients`, and update their state."""
    for group, settings in enumerate(plan.groups):
        places = [
            place for place, gradient in gradients.items()
            if plan.group_of[place] == group and gradient.size
            and gradient.dtype == state["parameters"][place].dtype == jnp.float32
        ]  # fmt: skip
        if not places:
            continue
        moved = update_group(
            settings, rates["lr"][group], [state["parameters"][place] for place in places],
            [gradients.pop(place) for place in places],
            [{key: state[key][place] for key in keys} for place in places], counts, places,
        )  # fmt: skip
        for place, (parameter, after) in zip(places, moved, strict=True):
            state["parameters"][place] = parameter
            for key in keys:
                state[key][place] = after[key]
