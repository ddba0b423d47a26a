"""What a captured step is: casts of the device that it is for."""

import contextlib
import functools
import itertools
import os
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from accbench.engines.common import cuda_autocast, python_state
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


def captured(model: nn.Module) -> Any:
    from accbench.engines.jax import capture, lowering

    with mock.patch.dict(os.environ):
        return capture.capture(
            model, lambda net, x: net(x).mean(), torch.randn(3, 8), contextlib.nullcontext,
            lowering.decompositions(),
        )  # fmt: skip


generator_of_module = np.random.default_rng(0)


class Drawing(nn.Module):
    """Multiplies by a number that is drawn in Python."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 4), draw
        self.generators = getattr(draw, "__self__", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.draw or generator_of_module.random)()


DRAWS = {
    "python's own": lambda: random.random,
    "a random.Random": lambda: random.Random(0).random,
    "a Generator": lambda: np.random.default_rng(0).random,
    "a RandomState": lambda: np.random.RandomState(0).random_sample,
    "a global Generator": lambda: None,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_pythons_are_refused_whichever_generator_draws_them(draw):
    with pytest.raises(RequestError, match="draws random numbers of Python's or numpy's"):
        captured(Drawing(DRAWS[draw]()))


def test_a_generator_that_only_the_loop_draws_from_is_none_of_the_steps():
    model = Drawing(lambda: 2.0)
    model.generators = np.random.default_rng(0)
    watch = python_state.PythonStateWatch(model)
    first = watch.state_id()
    model.generators.random()
    assert watch.state_id() == first
    assert captured(model).trained == [0, 1]


class Slotted:
    __slots__ = ("rate", "tensor")

    def __init__(self) -> None:
        self.rate, self.tensor = 1.0, torch.ones(1)


class Callable:
    """No module, and called as one."""

    def __init__(self) -> None:
        self.rate = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate


lazy_rate: Any = None
settings = SimpleNamespace(rate=1.0)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.slotted = nn.Linear(8, 4), Callable(), Slotted()
        self.numbers = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = (lazy_rate or 1.0) * settings.rate * self.slotted.rate
        return self.scale(self.linear(x)) * rate


CHANGES = {
    "a callable object": lambda net: setattr(net.scale, "rate", 2.0),
    "an object with slots": lambda net: setattr(net.slotted, "rate", 2.0),
    "a count": lambda net: next(net.numbers),
}


@pytest.mark.parametrize("change", CHANGES)
def test_objects_of_a_models_are_watched(change):
    net = Keeping()
    watch = python_state.PythonStateWatch(net)
    first = watch.state_id()
    assert watch.state_id() == first
    assert watch.changed == []
    CHANGES[change](net)
    assert watch.state_id() != first
    assert len(watch.changed) == 1
    # Tracing leaves another tensor there each time.
    last, net.slotted.tensor = watch.state_id(), torch.ones(2)
    assert watch.state_id() == last


@pytest.mark.parametrize("change", [("lazy_rate", 2.0), ("settings", SimpleNamespace(rate=2.0))])
def test_globals_that_were_none_and_those_of_objects_are_watched(change, monkeypatch):
    watch = python_state.PythonStateWatch(Keeping())
    first = watch.state_id()
    monkeypatch.setitem(globals(), *change)
    assert watch.state_id() != first
    assert watch.changed == [f"{__name__}.{change[0]}"]
    monkeypatch.undo()
    assert watch.state_id() == first


def test_a_loss_that_is_an_object_is_watched():
    criterion = Callable()
    watch = python_state.PythonStateWatch(nn.Linear(1, 1), [criterion])
    first = watch.state_id()
    criterion.rate = 2.0
    assert watch.state_id() != first


def test_functions_of_libraries_are_compared_by_identity():
    net = Keeping()
    net.scale = functools.partial(torch.mul, other=1.0)
    watch = python_state.PythonStateWatch(net)
    first = watch.state_id()
    net.scale = functools.partial(torch.mul, other=2.0)
    assert watch.state_id() != first


class Numbered(Keeping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(self.numbers)


def test_a_count_that_each_forward_pass_advances_is_refused():
    with pytest.raises(RequestError, match="every forward pass changes numbers"):
        captured(Numbered())
