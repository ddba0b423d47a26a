"""Models of which something of Python's changes while they train, in one engine.

    python -m tests.engines.changing_models ENGINE CASE...

Prints one line of JSON: case -> the losses of its steps and of those in plain torch, or what was
raised.
"""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engines.beside_torch import StepsBesideTorch

NUM_STEPS, CHANGED_AT = 10, 5
scale = 1.0
dice = random.Random()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scale


class Net(nn.Module):
    """A layer, and much that its output may depend on."""

    factor = 1.0

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.layer = case, nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.temperature, self.settings, self.count = 1.0, {"rates": [1.0]}, 0
        self.act, self.table, self.following = torch.tanh, torch.ones(4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = scaled(self.layer(x)) / self.temperature * self.settings["rates"][0] * self.factor
        if self.case == "set by the first step":
            self.temperature = 4.0
        if self.case == "lazily set":
            self.following = self.following or 2.0
            x = x * self.following
        if self.case == "counted":
            self.count += 1
            x = x / self.count
        if self.case == "drawn" and random.random() < 0.5:
            x = x * 2
        if self.case == "drawn by another" and dice.random() < 0.5:
            x = x * 2
        return self.act(x)


def another_hook(net: Net) -> None:
    net.layer[0].register_forward_hook(lambda module, given, out: out * 0.5)


def another_global(_: Net) -> None:
    global scale
    scale = 0.5


def another_constant(net: Net) -> None:
    net.settings["rates"][0] = 0.25


def another_class(_: Net) -> None:
    Net.factor = 0.5


CASES: dict[str, Callable[[Any], None]] = {
    "attribute": lambda net: setattr(net, "temperature", 3.0),
    "function": lambda net: setattr(net, "act", torch.sigmoid),
    "nested": another_constant,
    "hook": another_hook,
    "global": another_global,
    "class": another_class,
    "closure": lambda net: None,
    "set by the first step": lambda net: None,
    "lazily set": lambda net: None,
    "counted": lambda net: None,
    "drawn": lambda net: None,
    "drawn by another": lambda net: None,
    "every step": lambda net: None,
    "for nothing": lambda net: None,
}


class Spec:
    """Its loss has a constant of a closure."""

    def __init__(self) -> None:
        weight = 1.0

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            return (net(batch[0]) - 1).square().mean() * weight

        def change() -> None:
            nonlocal weight
            weight = 0.5

        self.loss, self.change = loss, change


def change(case: str, step: int, net: Any, spec: Spec) -> None:
    """What the loop does before a step."""
    if step == CHANGED_AT:
        CASES[case](net)
        if case == "closure":
            spec.change()
    if case == "every step":
        net.temperature = 1.0 + step
    if case == "for nothing":
        net.count = step


def losses(case: str, net: nn.Module, step: Callable[[Spec, Any], Any]) -> list[float]:
    global scale
    scale, Net.factor, spec = 1.0, 1.0, Spec()
    random.seed(0)
    dice.seed(0)
    losses = []
    inputs = torch.randn(NUM_STEPS, 8, 4, generator=torch.Generator().manual_seed(1))
    for number, batch in enumerate(inputs):
        change(case, number, net, spec)
        losses.append(float(step(spec, (batch,))))
    return losses


def train(case: str, engine_name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    steps = StepsBesideTorch(engine_name, Net(case), lr=0.1)
    return {
        "losses": losses(case, steps.net, steps.engine_step),
        "plain": losses(case, steps.plain, steps.plain_step),
    }


def main() -> None:
    found = {}
    engine, *cases = sys.argv[1:]
    for case in cases:
        try:
            found[case] = train(case, engine)
        except Exception as error:
            found[case] = {"raised": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
