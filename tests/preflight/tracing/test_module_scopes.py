"""Operations are named after the modules that they come from, backward too."""

import re

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

PROGRAM = """
import torch
import torch_xla
from torch import nn
from accbench.preflight.tracing import module_scopes

model = nn.Sequential()
model.add_module("first", nn.Linear(2, 2))
model.add_module("block", nn.Sequential(nn.ReLU()))
model.to(torch_xla.device())
batch = torch.ones(2, 2).to(torch_xla.device())
with module_scopes.name_operations(model):
    model(batch).sum().backward()
(batch * 2).sum()  # outside of the block
print(torch_xla._XLAC._get_xla_tensors_text([model.first.weight.grad, model(batch)]))
"""


def test_forward_and_backward_operations_name_their_module() -> None:
    done = python("-c", PROGRAM, XLA_IR_DEBUG="1", PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    scopes = re.findall(
        r"aten::(\w+)\(.*?(?:scope=([^,]*))?(?:, location|, xla_shape)", done.stdout
    )
    named = {(operation, re.sub(r"\.\d+", "", scope)) for operation, scope in scopes}
    assert {("addmm", "first"), ("mm", "backward.first"),
            ("threshold_backward", "backward.block")} <= named, done.stdout  # fmt: skip
    assert ("addmm", "") in named  # of the call after the block
