"""Dropout that all engines are given alike."""

from tests.conftest import python

# In a process that has imported nothing of torch.compile before.
COMPILED = """
import torch
from torch import nn
from accbench.comparing import dropout

layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
input = torch.randn(2, 3, 8)
draws = dropout.Draws(0)
found = []
with dropout.given():
    draws.learn(lambda: layer(input))
    for forward in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
        draws.begin(0, 0, lambda tensor: tensor)
        found.append(forward(input))
        assert not draws.others()
assert len(draws.shapes) == 4  # of attention, and three more
assert torch.equal(*found)
assert not torch.equal(found[0], layer.eval()(input))
"""


def test_torch_compile_looks_into_it():
    done = python("-c", COMPILED)
    assert done.returncode == 0, done.stderr
