"""Autocast under XLA has CUDA's rules, on every device, and computes what eager computes."""

import json
from typing import Any

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

# As torch documents for CUDA (torch.amp, "CUDA Ops that Autocast to ...").
RULES = {
    "conv2d": ["bfloat16", "bfloat16"],
    "linear": ["bfloat16", "bfloat16"],
    "matmul": ["bfloat16", "bfloat16"],
    "attention": ["bfloat16", "bfloat16"],
    "batch_norm": ["float32", "bfloat16"],
    "relu": ["float32", "bfloat16"],
    "relu in place": ["float32", "bfloat16"],
    "max_pool2d": ["float32", "bfloat16"],
    "layer_norm": ["float32", "float32"],
    "softmax": ["float32", "float32"],
    "cross_entropy": ["float32", "float32"],
    "sum": ["float32", "float32"],
    "exp": ["float32", "float32"],
    "cumsum": ["float32", "float32"],
    "add": ["float32", "bfloat16"],
    "cat with float32": ["float32", "float32"],
    "matmul, autocast off": "torch.float32",
    "matmul, outside": "torch.float32",
    "on the host": "torch.float32",
}


def answer(program: str) -> dict[str, Any]:
    done = python("-m", "tests.engines.xla_autocast", program, NPROC="1")
    assert done.returncode == 0, done.stderr
    assert "Overriding a previously registered kernel" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_types_are_those_of_cudas_rules_and_a_model_can_switch_them_off() -> None:
    assert answer("types") == RULES


def test_tensors_with_cudas_key_give_the_same_program() -> None:
    found = answer("keys")
    assert found["equal"]
    assert found["lines"] > 100
    assert found["f16"] > 20


def test_norms_relus_and_pools_are_torchs_to_the_precision_of_their_type() -> None:
    """Also at ties, after writes in between, and of geometries that are left to torch_xla."""
    for case, difference in answer("beside_float64").items():
        # A few roundings of the type's relative precision, 2^-11 and 2^-8.
        assert difference < (1.5e-2 if "bfloat16" in case else 1.5e-3), case
