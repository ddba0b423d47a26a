"""The search for overflows that decides whether a step in float16 is taken."""

import json
from importlib.util import find_spec

import pytest

from tests.conftest import python

# Gradients that are searched together in rows, and ones that are not; each is spoilt once.
CODE = """
import json
import torch
shapes = [(64, 16, 3, 3), (1024, 32), (7,), (), (3, 5, 7), (2048,), (0, 4)]
found = []
for value in (0.0, float("inf"), float("-inf"), float("nan")):
    for place in range(len(shapes) - 1):
        gradients = [torch.randn(shape) for shape in shapes]
        gradients[1] = gradients[1].half()
        gradients[place].view(-1)[-1] = value
        found.append((str(value), place, *said(gradients)))
print(json.dumps(found))
"""
BY_XLA = """
from accbench.engines.xla import lazy_import
device = lazy_import.torch_xla().device()
from accbench.engines.xla.sync_free import nonfinite
def said(gradients):
    of_all = nonfinite([gradient.to(device) for gradient in gradients])
    return list(of_all.shape), float(of_all.cpu())
"""
BY_JAX = """
import jax
from accbench.engines.jax.gradient_ops import any_nonfinite
search = jax.jit(any_nonfinite)
def said(gradients):
    of_all = search([jax.numpy.asarray(gradient.numpy()) for gradient in gradients])
    return list(of_all.shape), float(of_all)
"""
XLA, JAX = find_spec("torch_xla") is not None, find_spec("jax") is not None


@pytest.mark.parametrize(
    "by",
    [pytest.param(BY_XLA, id="xla", marks=[pytest.mark.xla, pytest.mark.skipif(
        not XLA, reason="torch_xla is not installed")]),
     pytest.param(BY_JAX, id="jax", marks=pytest.mark.skipif(
         not JAX, reason="jax is not installed"))],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_found_wherever_it_is(by: str) -> None:
    done = python("-c", by + CODE, PJRT_DEVICE="CPU", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 24
    for value, place, shape, said in found:
        assert shape == [], (value, place)
        assert said == (0.0 if value == "0.0" else 1.0), (value, place)
