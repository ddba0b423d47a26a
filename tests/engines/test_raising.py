"""What a model raises by itself is raised in each engine as plain PyTorch raises it."""

import json
from functools import cache

import pytest

from tests.conftest import python
from tests.engine_params import COMPILED
from tests.engines.raising_models import FAULTS

ENGINES = COMPILED


@cache
def raised_by(engine: str) -> dict:
    done = python("-m", "tests.engines.raising_models", engine, NPROC="1")
    assert done.returncode == 0, done.stderr  # torch_xla ends the process for some
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "index"])
@pytest.mark.parametrize("way", ["of_step", "of_call"])
def test_type_message_and_line_are_those_of_plain_pytorch(engine, fault, way):
    """Wrong shapes, keys, attributes, assertions, errors by value, a batch of one for BatchNorm."""
    case = f"{way} {fault}"
    assert raised_by("ddp")[case] or case == "of_call loss"
    assert raised_by(engine)[case] == raised_by("ddp")[case]
