"""Compiled evaluation, and what is left to torch."""

import contextlib
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("jax")

from accbench.engines.jax import arrays, data_mesh, evaluation, lowering  # noqa: E402

SPEC = SimpleNamespace(score=lambda net, batch: net(batch).sum())


@pytest.fixture
def compiled() -> Iterator[evaluation.CompiledEvaluation]:
    with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
        yield evaluation.CompiledEvaluation(contextlib.nullcontext, lowering.Rules())


def score(compiled: evaluation.CompiledEvaluation, net: nn.Module) -> torch.Tensor | None:
    batch, device = torch.ones(2, 3), data_mesh.local_device()
    weights = tuple(
        [arrays.from_torch(tensor, device) for tensor in tensors]
        for tensors in (net.parameters(), net.buffers())
    )
    inputs = [arrays.from_torch(batch, device)]
    return compiled.score(net, SPEC, batch, weights, inputs)  # type: ignore[arg-type]


class Drawing(nn.Module):
    """Draws in evaluation too, as models that sample do."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(3, 3), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.draw(x)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, lambda x: nn.functional.dropout(x, 0.5), lambda x: random.random()]
)
def test_models_that_draw_in_evaluation_are_left_to_torch(compiled, draw):
    """A compiled function would draw the same for each batch."""
    assert score(compiled, Drawing(draw).eval()) is None


def test_buffers_of_another_shape_are_scored_too(compiled):
    net = nn.Module()
    net.register_buffer("offset", torch.ones(1))
    net.forward = lambda x: x + net.offset  # type: ignore[method-assign]
    assert score(compiled, net) == 12
    net.offset = torch.tensor([[1.0], [2.0]])
    assert score(compiled, net) == 15
