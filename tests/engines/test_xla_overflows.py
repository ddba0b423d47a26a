"""The search for overflows that decides whether a step in float16 is taken."""

import json

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

# Gradients that are searched together in rows, and ones that are not; each is spoilt once.
CODE = """
import json
from accbench.engines.xla import importing
device = importing.torch_xla().device()
import torch
from accbench.engines.xla.sync_free import nonfinite
shapes = [(64, 16, 3, 3), (1024, 32), (7,), (), (3, 5, 7), (2048,)]
found = []
for value in (0.0, float("inf"), float("-inf"), float("nan")):
    for place in range(len(shapes)):
        gradients = [torch.randn(shape) for shape in shapes]
        gradients[1] = gradients[1].half()
        gradients[place].view(-1)[-1] = value
        said = nonfinite([gradient.to(device) for gradient in gradients])
        found.append((str(value), place, list(said.shape), float(said.cpu())))
print(json.dumps(found))
"""


def test_a_value_that_is_not_finite_is_found_wherever_it_is() -> None:
    done = python("-c", CODE, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 24
    for value, place, shape, said in found:
        assert shape == [], (value, place)
        assert said == (0.0 if value == "0.0" else 1.0), (value, place)
