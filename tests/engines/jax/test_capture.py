"""What a captured step is: casts of the device that it is for."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from torch import nn

from accbench.engines.common import cuda_autocast
from accbench.errors import RequestError

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
        (lambda: cuda_autocast.autocast(torch.bfloat16), {"exp", "sum"}),
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


class Failing(nn.Module):
    """Fails as it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.norm = how, nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x)
        if self.how == "norm":
            return self.norm(scores[:1])
        if self.how == "key":
            return {"scores": scores}["logits"]
        if self.how == "shape":
            return scores @ scores
        if self.how == "value" and scores.sum() > 0:
            return scores
        return scores[scores > 0]


@pytest.mark.parametrize(("how", "kind", "words"), [
    ("norm", ValueError, "Expected more than 1 value per channel"),
    ("key", KeyError, "logits"),
    ("shape", RuntimeError, "mat1 and mat2"),
    ("value", RequestError, "if self.how == \"value\" and scores.sum() > 0"),
    ("mask", RequestError, "take out what depends on values, or use --engine"),
])  # fmt: skip
def test_what_a_model_raises_by_itself_is_not_blamed_on_the_capture(how, kind, words):
    """All engines raise the first three; the others are Python that asks for values."""
    from accbench.engines.jax import capture, lowering

    model = Failing(how)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with mock.patch.dict(os.environ), pytest.raises(kind) as caught:
        capture.capture(
            model, lambda net, x: net(x).mean(), torch.randn(3, 8), contextlib.nullcontext,
            lowering.decompositions(),
        )  # fmt: skip
    assert words in str(caught.value)
    assert ("take out what depends on values" in str(caught.value)) == (kind is RequestError)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Annealing(nn.Module):
    """Has a number that each forward pass changes, or that the first one sets."""

    def __init__(self, ends: float) -> None:
        super().__init__()
        self.linear, self.temperature, self.ends = nn.Linear(8, 4), 1.0, ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature = max(self.temperature * 0.5, self.ends)
        return self.linear(x) / self.temperature


def test_numbers_that_each_forward_pass_changes_are_refused():
    """A captured step would go on with the first one's."""
    from accbench.engines.jax import capture, lowering

    def captured(ends):
        return capture.capture(
            Annealing(ends), lambda net, x: net(x).mean(), torch.randn(3, 8),
            contextlib.nullcontext, lowering.decompositions(),
        )  # fmt: skip

    with mock.patch.dict(os.environ), pytest.raises(RequestError, match="changes temperature"):
        captured(ends=0.0)
    with mock.patch.dict(os.environ):
        assert captured(ends=0.5).trained == [0, 1]
