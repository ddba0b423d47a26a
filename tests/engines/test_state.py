"""Training states that are put back into models which make loading hard."""

import torch
from torch import nn

from accbench.engines.common import training_state
from tests import nets
from tests.conftest import TINY, run


class Tabled(nn.Module):
    """A table that grows to the size of what is given, and is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(1, 2), persistent=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if len(self.table) != len(given):
            self.table = torch.ones(len(given), 2)
        return self.linear(given) + self.table


def test_a_buffer_is_loaded_in_the_shape_that_it_had():
    net = Tabled()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = training_state.read(net, optimizer, None)
    net(torch.zeros(3, 2))
    behind = training_state.read(net, optimizer, None)
    training_state.load(net, optimizer, None, before)
    assert net.table.tolist() == [[0, 0]]
    fresh = Tabled()
    training_state.load(fresh, torch.optim.SGD(fresh.parameters(), 0.1), None, behind)
    assert fresh.table.tolist() == [[1, 1]] * 3
    assert torch.equal(fresh(torch.ones(3, 2)), net(torch.ones(3, 2)))


def test_modules_are_told_the_version_of_what_they_load(images, tmp_path):
    """Of their own state: as torchvision's MNASNet, which refuses tensors without one."""
    net = nets.versioned(3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    training_state.load(net, optimizer, None, training_state.read(net, optimizer, None))
    flags = (*TINY, "--model=tests.nets:versioned", f"--data=mock:{images}", "--nproc_per_node=2",
             "--epochs=2", f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    for more in (["--max_steps=4"], ["--max_steps=8", "--resume=auto"]):
        result = run(*flags, *more)
        assert result.returncode == 0, result.stderr
