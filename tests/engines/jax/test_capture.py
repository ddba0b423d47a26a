"""What a captured step is: casts of the device that it is for."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

from accbench.engines import cuda_rules

pytest.importorskip("jax")


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp().sum(1)


@pytest.mark.parametrize(
    ("autocast", "wide"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), set()),
        (lambda: cuda_rules.autocast(torch.bfloat16), {"exp", "sum"}),
    ],
    ids=["cpu", "cuda"],
)
def test_casts_are_those_of_the_device(autocast, wide):
    """On CUDA exponentials and sums are in float32, on a CPU in what a product gave."""
    from accbench.engines.jax import capture, lowering

    model, batch = Exponential(), torch.randn(3, 8)
    with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
        found = capture.capture(
            model, lambda net, x: net(x).float().mean(), batch, autocast, lowering.decompositions()
        )
    forward = {}
    for node in found.graph.graph.nodes:
        name = str(node.target).split(".")[1] if node.op == "call_function" else ""
        if name in ("addmm", "exp", "sum"):
            forward.setdefault(name, node.meta["val"].dtype)
    assert forward == {
        name: torch.float32 if name in wide else torch.bfloat16 for name in ("addmm", "exp", "sum")
    }
    assert not torch.is_autocast_enabled("cuda")
