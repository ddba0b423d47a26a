"""Reductions through XLA are those of PyTorch, over whichever dimensions are named."""

import json

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def test_values_gradients_and_errors_are_torchs() -> None:
    done = python("-m", "tests.engines.xla_reductions", NPROC="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["others"], "\n".join(found["others"])
    assert found["tried"] > 350
