"""Gather sharded weights where a captured step uses them, rather than all at its beginning.

Gathered at the beginning, all weights live through the step, and so do whole gradients that are
reduced at its end. Here the graph itself gathers: once for the forward pass and again for the
backward pass, and reduces each gradient, so that a weight and its gradient live while its layer
computes, as in FSDP. A weight that is only used in 16 bits is cast before it is gathered, which
gives the same numbers.

XLA's scheduler would gather all as early as it can, and await reductions as late as it can. So each
gathering reads an activation, or a gradient, of one window of bytes before its use, and in the
backward pass also a gradient that was reduced one window before that. An optimization barrier would
not do, because XLA drops it before it schedules.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from accbench.engines.jax.capture import CapturedStep
from accbench.engines.jax.data_mesh import Axis

# Operations that only move or cast, and are computed again for the backward pass.
_CHEAP = (
    "aten._to_copy", "aten.permute", "aten.t", "aten.transpose", "aten.view", "aten.expand",
    "aten.unsqueeze", "aten._unsafe_view", "aten.alias", "aten.detach", "aten.clone",
)  # fmt: skip
_HALVES = (torch.bfloat16, torch.float16)
# The part of all gathered bytes that may be gathered ahead of its use.
_WINDOW = 1 / 16


class _GraphOperation:
    """An operation of the graph's own, which `lowering.rows.collectives` computes."""

    __module__ = "accbench"

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __str__(self) -> str:
        return f"accbench.{self.__name__}.default"

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError("only engine jax computes it")


GATHER_WEIGHT = _GraphOperation("gather_weight")
REDUCE_GRADIENT = _GraphOperation("reduce_gradient")


@dataclasses.dataclass
class _Weight:
    """A sharded parameter in the graph."""

    placeholder: fx.Node
    axis: int
    chain: list[fx.Node]
    """The placeholder, and what is made of it by moving and casting alone."""
    forward: list[fx.Node]
    """Other nodes that read these in the forward pass, in order."""
    backward: list[fx.Node]
    """Other nodes that read these in the backward pass, in order."""
    cast: torch.dtype | None
    """The type of 16 bits in which alone it is used."""
    gradient: fx.Node | None = None
    """Its reduced gradient."""

    @property
    def num_bytes(self) -> int:
        value: torch.Tensor = self.placeholder.meta["val"]
        return value.numel() * (2 if self.cast else value.element_size())


def rewrite(
    captured: CapturedStep, axes: Sequence[Axis], num_ranks: int
) -> tuple[CapturedStep, set[int]]:
    """Return the step with gatherings in its graph, and which parameters it gathers.

    Args:
        captured: whose graph is changed.
        axes: of each parameter in the model's order, the axis along which it is sharded.
        num_ranks: over which they are sharded.

    Returns:
        The step, which takes shards of some parameters and returns the ranks' mean of shards of
        their gradients, and the indices of these parameters.
    """
    graph = captured.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    trained = set(captured.trained)
    order = [*captured.trained, *(i for i in range(len(axes)) if i not in trained)]
    position = {node: index for index, node in enumerate(graph.nodes)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    loss_index = len(captured.mutated_buffers) + captured.num_mutated_inputs + 1
    arguments: Any = output.args
    loss = arguments[0][loss_index]
    weights: dict[int, _Weight] = {}
    for index, node in zip(order, placeholders, strict=False):
        axis = axes[index]
        value = node.meta["val"]
        if axis is not None and value.dim() > 1 and value.is_floating_point():
            weight = _weight(node, axis, position, position[loss])
            if weight.forward:
                weights[index] = weight
    if not weights:
        return captured, set()
    _reduce_gradients(captured, output, loss_index, weights, num_ranks, position)
    window = int(max([_WINDOW * sum(w.num_bytes for w in weights.values()),
                      *(w.num_bytes for w in weights.values())]))  # fmt: skip
    chained = {node for weight in weights.values() for node in weight.chain}
    everything = [*weights.values()]
    for weight, after in _in_order(everything, "backward", chained, window, position):
        if after:
            _replace(graph, weight, weight.backward, after)
        else:  # used where the backward pass begins: what the forward pass has gathered
            weight.forward += weight.backward
    for weight, after in _in_order(everything, "forward", chained, window, position):
        _replace(graph, weight, weight.forward, after)
    graph.eliminate_dead_code()
    return captured, set(weights)


def _reduce_gradients(
    captured: CapturedStep, output: fx.Node, loss_index: int, weights: dict[int, _Weight],
    num_ranks: int, position: dict[fx.Node, int],
) -> None:  # fmt: skip
    """Have the graph return each rank's shard of the mean of gradients."""
    arguments: Any = output.args
    results: list[Any] = [*arguments[0]]
    for result_index, index in enumerate(captured.trained, start=loss_index + 1):
        weight, whole = weights.get(index), results[result_index]
        if weight is None:
            continue
        with captured.graph.graph.inserting_after(whole):
            reduced = captured.graph.graph.call_function(REDUCE_GRADIENT, (whole, weight.axis))
        length = whole.meta["val"].shape[weight.axis] // num_ranks
        reduced.meta["val"] = whole.meta["val"].narrow(weight.axis, 0, length)
        position[reduced] = position[whole]
        weight.gradient = results[result_index] = reduced
    output.args = (tuple(results),)


def _weight(
    placeholder: fx.Node, axis: int, position: dict[fx.Node, int], loss_position: int
) -> _Weight:
    chain: list[fx.Node] = [placeholder]
    users: list[fx.Node] = []
    for node in chain:  # grows on the way
        for user in node.users:
            if str(user.target).startswith("aten._assert_"):
                continue
            (chain if _is_cheap(user) else users).append(user)
    users = sorted(set(users), key=position.__getitem__)
    first = [user for user in placeholder.users if user in chain or user in users]
    casts = {user.meta["val"].dtype if _is_cast(user) else None for user in first}
    cast = casts.pop() if len(casts) == 1 else None
    return _Weight(
        placeholder, axis, chain,
        [user for user in users if position[user] <= loss_position],
        [user for user in users if position[user] > loss_position],
        cast if cast in _HALVES else None,
    )  # fmt: skip


def _is_cheap(node: fx.Node) -> bool:
    name = str(node.target).rpartition(".")[0]
    return node.op == "call_function" and name in _CHEAP and len(node.all_input_nodes) == 1


def _is_cast(node: fx.Node) -> bool:
    return str(node.target).startswith("aten._to_copy")


def _in_order(
    weights: list[_Weight], of_pass: str, chained: set[fx.Node], window: int,
    position: dict[fx.Node, int],
) -> list[tuple[_Weight, list[fx.Node]]]:  # fmt: skip
    """Return the weights in their order of use, and what the gathering of each waits for.

    That is nothing where they are within the window of the pass's beginning.
    """
    used = [weight for weight in weights if getattr(weight, of_pass)]
    used.sort(key=lambda weight: position[getattr(weight, of_pass)[0]])
    pairs: list[tuple[_Weight, list[fx.Node]]] = []
    for index, weight in enumerate(used):
        earliest = _window_before(used, index, window)
        user = getattr(used[earliest], of_pass)[0]
        after = _activation(user, chained) if earliest else None
        waits = [] if after is None else [after]
        if waits and of_pass == "backward":
            reduced = used[_window_before(used, earliest, window)].gradient
            first_use = position[weight.backward[0]]
            if reduced is not None and position[reduced] < first_use:
                waits.append(reduced)
        pairs.append((weight, waits))
    return pairs


def _window_before(used: list[_Weight], index: int, window: int) -> int:
    """Return the first of the weights before one that together fit the window with it."""
    ahead = used[index].num_bytes
    while index and ahead + used[index - 1].num_bytes <= window:
        index -= 1
        ahead += used[index].num_bytes
    return index


def _activation(user: fx.Node, chained: set[fx.Node]) -> fx.Node | None:
    """Return what a weight's user reads beside it."""
    for node in user.all_input_nodes:
        value = node.meta.get("val")
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and node.op != "placeholder" and node not in chained:
            return node
    return None


def _replace(
    graph: fx.Graph, weight: _Weight, users: list[fx.Node], after: list[fx.Node]
) -> None:  # fmt: skip
    """Gather a weight before the first of its users, and have them all use that."""
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(users[0]):
        value = weight.placeholder.meta["val"]
        gathered = graph.call_function(
            GATHER_WEIGHT, (weight.placeholder, after, weight.axis, weight.cast)
        )
        gathered.meta["val"] = value if weight.cast is None else value.to(weight.cast)
        copies[weight.placeholder] = gathered
        for node in weight.chain:
            if node is weight.placeholder:
                continue
            if weight.cast is not None and weight.placeholder in node.all_input_nodes:
                copies[node] = gathered  # the cast itself
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    for user in users:
        for node in [*user.all_input_nodes]:
            if node in copies and node in weight.chain:
                user.replace_input_with(node, copies[node])
