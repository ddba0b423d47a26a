"""Sharded weights are gathered by the graph, where they are used, and gradients are reduced."""

import contextlib

import pytest
import torch
from torch import nn

pytest.importorskip("jax")

from accbench.engines.jax import capture, late_gathers, lowering  # noqa: E402

WIDTH, LAYERS = 64, 40


class Deep(nn.Module):
    """Equal layers, of which a window of a sixteenth holds two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().sum()


@pytest.fixture(scope="module")
def nodes() -> list[torch.fx.Node]:
    def autocast() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    net = Deep()
    captured = capture.capture(net, loss, torch.ones(2, WIDTH), autocast, lowering.decompositions())
    axes = [0 if parameter.dim() > 1 else None for parameter in net.parameters()]
    rewritten, late = late_gathers.rewrite(captured, axes, num_ranks=4)
    assert late == {*range(0, 2 * LAYERS, 2)}  # weights, without biases
    return [*rewritten.graph.graph.nodes]


def test_a_weight_is_gathered_for_each_pass_in_sixteen_bits(nodes):
    gathers = [node for node in nodes if node.target is late_gathers.GATHER_WEIGHT]
    assert {node.args[3] for node in gathers} == {torch.bfloat16}
    assert {tuple(node.meta["val"].shape) for node in gathers} == {(WIDTH, WIDTH)}
    by_weight: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in gathers:
        by_weight.setdefault(node.args[0], []).append(node)
    times = [len(of_weight) for of_weight in by_weight.values()]
    # The first has no gradient of its input, and the last ones are there when the backward begins.
    assert times[0] == 1
    assert times[-2:] == [1, 1]
    assert set(times[1:-2]) == {2}


def test_a_gathering_waits_for_what_is_computed_a_window_before(nodes):
    position = {node: index for index, node in enumerate(nodes)}
    gathers = [node for node in nodes if node.target is late_gathers.GATHER_WEIGHT]
    assert all(not node.args[1] for node in gathers[:2])  # where the step begins
    assert all(node.args[1] for node in gathers[2:])
    products = [node for node in nodes if "mm" in str(node.target)]
    for node in gathers[2:]:
        user = next(product for product in products if node in _inputs(product))
        between = [p for p in products if position[node.args[1][0]] < position[p] < position[user]]
        assert 1 <= len(between) <= 4
    assert sum(len(node.args[1]) == 2 for node in gathers) >= LAYERS - 8  # and for a reduction


def _inputs(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What a product reads, through operations that only move it."""
    found, left = set(), [*node.all_input_nodes]
    while left:
        reached = left.pop()
        found.add(reached)
        if str(reached.target).startswith(("aten.t.", "aten.transpose", "aten.permute")):
            left += reached.all_input_nodes
    return found


def test_gradients_are_returned_as_shards(nodes):
    results = nodes[-1].args[0]
    reduced = [node for node in results if node.target is late_gathers.REDUCE_GRADIENT]
    assert len(reduced) == LAYERS
    assert {tuple(node.meta["val"].shape) for node in reduced} == {(WIDTH // 4, WIDTH)}
