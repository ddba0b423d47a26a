"""Dropout that drops the same elements in every engine."""

from tests.conftest import python

# In a process that has imported nothing of torch.compile before.
COMPILED = """
import torch
from torch import nn
from accbench.comparing import shared_dropout

layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
input = torch.randn(2, 3, 8)
draws = shared_dropout.Draws(0)
outputs = []
with shared_dropout.shared_dropout():
    draws.learn(lambda: layer(input))
    for forward in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
        draws.begin(0, 0, lambda tensor: tensor)
        outputs.append(forward(input))
        assert not draws.num_others()
assert len(draws.shapes) == 4  # of attention, and three more
assert torch.equal(*outputs)
assert not torch.equal(outputs[0], layer.eval()(input))
"""


def test_torch_compile_looks_into_it():
    done = python("-c", COMPILED)
    assert done.returncode == 0, done.stderr
