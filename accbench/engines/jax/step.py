"""The whole training step as one function of JAX arrays, around a captured graph."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from accbench.config import plugins
from accbench.engines.common import optimizer_state
from accbench.engines.jax import gradient_ops, late_gathers
from accbench.engines.jax.capture import CapturedStep
from accbench.engines.jax.data_mesh import Axis, DataMesh
from accbench.engines.jax.lowering import Rules, run_graph

Tree = Any


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Everything that a step does apart from its graph."""

    optimizer: str
    groups: list[dict[str, Any]]
    """Settings of the optimizer's groups that no schedule changes."""
    group_of: list[int]
    """Index of a parameter in the model -> index of its group."""
    num_microbatches: int
    """Gradients of so many parts of a batch are added up."""
    num_batch_tensors: int
    """Tensors of a batch; those of the extra inputs come behind them."""
    num_extra_tensors: list[int]
    """Tensors of each source of extra inputs, for all microbatches."""
    clip_norm: float | None
    ema_decay: float | None
    skip_nonfinite: bool
    """Undo steps whose gradients are not finite, their changes of buffers too."""
    loss_scaling: dict[str, Any] | None
    """The loss scale's growth, backoff and interval; None without a loss scale."""
    shard_axes: list[Axis]
    """Index of a parameter in the model -> the axis along which it is sharded."""
    tp_axes: list[Axis]
    """Index of a parameter in the model -> the axis along which ranks have parts (`--tp`)."""
    of_sequence_parts: list[bool]
    """Index of a parameter in the model -> whether each rank of `--tp` uses it for a part of the
    sequence alone (`--sequence_parallel`)."""
    gathers_late: bool
    """Gather sharded weights where they are used, twice a step, rather than all at its start."""
    barrier_before_update: bool
    """Begin no update before all gradients are reduced."""
    rules: Rules
    """How the graph is lowered."""


def build_step(captured: CapturedStep, plan: StepPlan, mesh: DataMesh) -> Callable[..., Any]:
    """Build the function of a step.

    It takes, and returns first, `state`: parameters (in the model's order), what the optimizer
    keeps of each (key -> arrays in that order), counts (parameters,) float32 of steps taken, and
    scale and tracker where the loss is scaled; and `local_state`: the model's buffers. Then
    come `rates` (lr, (groups,) float32), and `inputs`: inputs (the batch's tensors and the extra
    inputs) and random ((2,) uint32: seed, number of the step). The loss, float32 (), is last.
    """
    late: set[int] = set()
    if plan.gathers_late:
        captured, late = late_gathers.rewrite(captured, plan.shard_axes, mesh.num_token_ranks)
    axes = [plan.shard_axes[index] for index in captured.trained]
    tp_axes = [plan.tp_axes[index] for index in captured.trained]
    of_parts = [plan.of_sequence_parts[index] for index in captured.trained]

    def sum_over_shards(local_sums: Any) -> Any:
        return mesh.sum_over_shards(local_sums, axes, tp_axes)

    def step(state: Tree, local_state: Tree, rates: Tree, inputs: Tree) -> tuple[Tree, Tree, Any]:
        scale = state["scale"] if plan.loss_scaling else jnp.float32(1)
        pairs = zip(state["parameters"], plan.shard_axes, strict=True)
        parameters = [
            array if index in late else mesh.all_gather(array, axis)
            for index, (array, axis) in enumerate(pairs)
        ]
        loss, gradients, buffers = _gradients(
            captured, plan, parameters, local_state, inputs, scale
        )
        gradients = _reduced(captured, mesh, [_as_real(g) for g in gradients], axes, late)
        gradients = mesh.sum_over_tp(gradients, of_parts)
        if plan.barrier_before_update:
            gradients = gradient_ops.gradient_barrier(gradients)
        overflow = jnp.bool_(False)
        if plan.loss_scaling:
            gradients = [g * (1 / scale).astype(g.dtype) for g in gradients]
        if plan.loss_scaling or plan.skip_nonfinite:
            overflow = mesh.any_rank(gradient_ops.any_nonfinite(gradients), axes, tp_axes)
        if plan.clip_norm is not None:
            gradients = gradient_ops.clip_by_global_norm(gradients, plan.clip_norm, sum_over_shards)
        if plan.skip_nonfinite:
            changes = zip(local_state["buffers"], buffers, strict=True)
            buffers = [jnp.where(overflow, before, after) for before, after in changes]
        state = _updated(captured, plan, state, rates, gradients, overflow)
        if plan.loss_scaling:
            state["scale"], state["tracker"] = gradient_ops.next_loss_scale(
                state["scale"], state["tracker"], overflow, **plan.loss_scaling
            )
        return state, {"buffers": buffers}, loss

    return step


def _reduced(
    captured: CapturedStep, mesh: DataMesh, gradients: list[Any], axes: list[Axis], late: set[int]
) -> list[Any]:
    """Return the ranks' means of gradients, some of which the graph has reduced."""
    rest = [i for i, index in enumerate(captured.trained) if index not in late]
    means = mesh.reduce_mean([gradients[i] for i in rest], [axes[i] for i in rest])
    reduced = dict(zip(rest, means, strict=True))
    return [reduced.get(i, gradient) for i, gradient in enumerate(gradients)]


def _gradients(
    captured: CapturedStep, plan: StepPlan, parameters: list[Any], local_state: Tree,
    inputs: Tree, scale: Any,
) -> tuple[Any, list[Any], list[Any]]:  # fmt: skip
    """Return (loss, gradients of the scaled loss, buffers) of a batch, by microbatches."""
    seed, step_number = inputs["random"]
    key = jax.random.fold_in(jax.random.key(seed), step_number)

    def run_microbatch(
        buffers: list[Any], tensors: list[Any], key: Any
    ) -> tuple[Any, list[Any], list[Any]]:
        factor = scale / plan.num_microbatches
        graph_inputs = captured.inputs(parameters, buffers, factor, *tensors)
        values = run_graph(captured.graph, graph_inputs, key, plan.rules)
        changed, loss, gradients = captured.outputs(values)
        buffers = list(buffers)
        for index, value in zip(captured.mutated_buffers, changed, strict=True):
            buffers[index] = value.astype(buffers[index].dtype)
        return loss.astype(jnp.float32) / plan.num_microbatches, gradients, buffers

    if plan.num_microbatches == 1:
        return run_microbatch(local_state["buffers"], inputs["inputs"], key)
    microbatches = _microbatches(captured, plan, inputs["inputs"])

    def accumulate(carry: Any, microbatch: Any) -> tuple[Any, None]:
        total_loss, gradients, buffers = carry
        tensors, number = microbatch
        microbatch_key = jax.random.fold_in(key, number)
        loss, new_gradients, buffers = run_microbatch(buffers, tensors, microbatch_key)
        summed = [a + b for a, b in zip(gradients, new_gradients, strict=True)]
        return (total_loss + loss, summed, buffers), None

    zeros = [jnp.zeros_like(parameters[index]) for index in captured.trained]
    carry = jnp.float32(0), zeros, local_state["buffers"]
    xs = microbatches, jnp.arange(plan.num_microbatches)
    carry, _ = jax.lax.scan(accumulate, carry, xs)
    return carry


def _microbatches(captured: CapturedStep, plan: StepPlan, inputs: list[Any]) -> list[Any]:
    """Return the graph's inputs for each microbatch, stacked along a new first axis."""
    batch, extra = inputs[: plan.num_batch_tensors], inputs[plan.num_batch_tensors :]
    microbatches = [array.reshape(plan.num_microbatches, -1, *array.shape[1:]) for array in batch]
    for num_tensors, reads in zip(plan.num_extra_tensors, captured.reads, strict=True):
        source, extra = extra[:num_tensors], extra[num_tensors:]
        # Every forward pass reads on where the one before it stopped.
        for index in range(num_tensors):
            starts = [index + number * reads for number in range(plan.num_microbatches)]
            stacked = jnp.stack([source[start % num_tensors] for start in starts])
            microbatches.append(stacked)
    return microbatches


def _as_real(array: Any) -> Any:
    """Return complex numbers as pairs of real ones, (..., 2), as optimizers see them."""
    return jnp.stack([array.real, array.imag], -1) if jnp.iscomplexobj(array) else array


def _as_complex(like: Any, real_pairs: Any) -> Any:
    """Return the inverse of `_as_real`: pairs as complex numbers where `like` is complex."""
    if not jnp.iscomplexobj(like):
        return real_pairs
    return jax.lax.complex(real_pairs[..., 0], real_pairs[..., 1])


def _updated(
    captured: CapturedStep,
    plan: StepPlan,
    state: Tree,
    rates: Tree,
    gradients: list[Any],
    overflow: Any,
) -> Tree:
    """Return the state after the optimizer's step, or as it was where gradients overflowed."""
    state = {key: list(v) if isinstance(v, list) else v for key, v in state.items()}
    may_skip = plan.loss_scaling is not None or plan.skip_nonfinite
    trained = jnp.asarray(captured.trained)
    taken = jnp.where(overflow, 0.0, 1.0) if may_skip else 1.0
    counts = state["counts"].at[trained].add(taken)
    optimizer = plugins.load("optimizers", plan.optimizer)
    keys = optimizer.state_keys
    gradient_of_param = dict(zip(captured.trained, gradients, strict=True))
    update_group = optimizer.jax_group_update()
    if plan.rules.torch_updates and update_group is not None and not may_skip:
        _update_by_torch(plan, update_group, keys, state, rates, gradient_of_param, counts)
    for index, gradient in gradient_of_param.items():
        group, parameter = plan.group_of[index], state["parameters"][index]
        before = {key: state[key][index] for key in keys}
        updated, after = optimizer.update(
            jnp, plan.groups[group], rates["lr"][group], _as_real(parameter), gradient,
            {key: _as_real(array) for key, array in before.items()}, counts[index],
        )  # fmt: skip
        updated = _as_complex(parameter, updated)
        after = {key: _as_complex(before[key], array) for key, array in after.items()}
        pairs = {"parameters": (parameter, updated)} | {k: (before[k], after[k]) for k in keys}
        for key, (old, new) in pairs.items():
            new = new.astype(old.dtype)  # rates and counts are float32, parameters may be narrower
            state[key][index] = jnp.where(overflow, old, new) if may_skip else new
    if plan.ema_decay:
        pairs_of_averages = zip(state[optimizer_state.AVERAGE], state["parameters"], strict=True)
        state[optimizer_state.AVERAGE] = [
            (a + (1 - plan.ema_decay) * (p - a)).astype(a.dtype) for a, p in pairs_of_averages
        ]
    return {**state, "counts": counts}


def _update_by_torch(
    plan: StepPlan, update_group: Any, keys: Sequence[str], state: Tree, rates: Tree,
    gradients: dict[int, Any], counts: Any,
) -> None:  # fmt: skip
    """Update the float32 parameters of each group at once by torch's kernel.

    Their gradients are taken out of `gradients`, and their entries in `state` replaced.
    """
    for group, settings in enumerate(plan.groups):
        indices = [
            index for index, gradient in gradients.items()
            if plan.group_of[index] == group and gradient.size
            and gradient.dtype == state["parameters"][index].dtype == jnp.float32
        ]  # fmt: skip
        if not indices:
            continue
        updated = update_group(
            settings, rates["lr"][group], [state["parameters"][index] for index in indices],
            [gradients.pop(index) for index in indices],
            [{key: state[key][index] for key in keys} for index in indices], counts, indices,
        )  # fmt: skip
        for index, (parameter, after) in zip(indices, updated, strict=True):
            state["parameters"][index] = parameter
            for key in keys:
                state[key][index] = after[key]
