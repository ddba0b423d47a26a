"""How many steps in a row may be captured anew, and whose fault it is called."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accbench.errors import RequestError

pytest.importorskip("jax")

from accbench.engines.jax.compiled_steps import CompiledSteps  # noqa: E402
from accbench.engines.jax.recapture import _MAX_CONSECUTIVE  # noqa: E402

NUM_STEPS = _MAX_CONSECUTIVE + 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature, self.last_length = nn.Linear(2, 2), 1.0, 0


class Steps:
    """Finds steps as engine jax does, and compiles none."""

    def __init__(self) -> None:
        self.net = Net()
        self._optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self._spec = SimpleNamespace(loss=lambda net, batch: net(batch).mean())
        unused: tuple = (None,) * 6
        self._steps = CompiledSteps(*unused)

    def take(self, length: int) -> None:
        arguments = self.net, self._spec, self._optimizer, torch.zeros(length, 2)
        if self._steps.find(*arguments) is None:  # type: ignore[arg-type]
            key = self._steps._key(*arguments)  # type: ignore[arg-type]
            self._steps._steps[key] = SimpleNamespace()  # type: ignore[assignment]
            self.net.last_length = length  # a model that notes what it has seen


def test_any_number_of_new_shapes_in_a_row_is_captured():
    steps = Steps()
    for length in range(1, NUM_STEPS):
        steps.take(length)


def test_one_change_before_shapes_that_are_known_is_one_change():
    steps = Steps()
    for temperature in (1.0, 2.0):
        steps.net.temperature = temperature
        for length in range(1, NUM_STEPS):
            steps.net.last_length = 0
            steps.take(length)


def test_a_number_that_changes_before_every_step_is_refused_by_its_name():
    steps = Steps()

    def train() -> None:
        for number in range(NUM_STEPS):
            steps.net.temperature = 1.0 + number
            steps.take(3)

    steps.net.last_length = 3
    with pytest.raises(RequestError, match="captures a step once, and temperature changes before"):
        train()
