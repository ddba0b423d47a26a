"""Operations through XLA are those of PyTorch; interpolation and pooling stay in the graph."""

import json

import pytest

from tests.conftest import python
from tests.engines.operation_cases import cases

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla
NAMES = [case.name for case in cases()]


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    done = python("-m", "tests.engines.xla_operations", NPROC="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_torchs(problems, name):
    assert problems[name] is None


def test_all_are_tried(problems):
    assert set(problems) == set(NAMES)
    assert len(NAMES) > 300
