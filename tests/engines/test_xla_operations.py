"""Operations through XLA are those of PyTorch; interpolation and pooling stay in the graph."""

import json

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def test_values_and_gradients_are_torchs() -> None:
    done = python("-m", "tests.engines.xla_operations", NPROC="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["others"], "\n".join(found["others"])
    assert found["tried"] > 300
