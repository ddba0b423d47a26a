"""Models of many kinds in each engine: they train as plain PyTorch in float64 has them train."""

import importlib.util
import json
from functools import cache

import pytest

from tests.conftest import python
from tests.engine_params import JAX, XLA
from tests.engines.any_model import MODELS

ENGINES = ("ddp", "inductor", XLA, JAX)


# Of them more is asked than that they train; inductor takes seconds for each of the others.
TOLD_OF = ("shared_memory", "masks")


def found_by(engine: str, model: str) -> dict:
    """What came of a model."""
    others = tuple(name for name in MODELS if name not in TOLD_OF)
    models = TOLD_OF if model in TOLD_OF else others
    return _found_by(engine, models if engine == "inductor" else MODELS)[model]


@cache
def _found_by(engine: str, models: tuple[str, ...]) -> dict:
    done = python("-m", "tests.engines.any_model", engine, *models, NPROC="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "engine", [ENGINES[0], pytest.param("inductor", marks=pytest.mark.soak), *ENGINES[2:]]
)
@pytest.mark.parametrize("model", [name for name in MODELS if name not in TOLD_OF])
def test_weights_and_buffers_are_those_of_float64(engine: str, model: str) -> None:
    """Tied weights and buffers, unused and frozen ones, activation checkpointing, cumulative
    BatchNorm, other forms of logits. Rounding makes 1e-5 of it; one step left out, more than a
    tenth."""
    found = found_by(engine, model)
    assert found.get("away", found) < 1e-3


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_so_they_are_where_an_operation_leaves_the_compiler(engine: str) -> None:
    found = found_by(engine, "masks")
    assert found.get("away", found) < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_that_are_views_of_one_memory_are_refused(engine: str) -> None:
    raised = found_by(engine, "shared_memory")["raised"]
    assert raised.startswith("RequestError: parameters net.6.weight and net.7.weight share memory")


@pytest.mark.parametrize("engine", ENGINES[1:3])
def test_what_leaves_the_compiler_is_named_with_its_line(engine: str) -> None:
    (line,) = found_by(engine, "masks")["left"]
    assert "tests/nets/" in line
    assert line.endswith(": bright = images[images > 0.5]")


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs jax")
def test_what_cannot_be_captured_is_named_with_its_line() -> None:
    raised = found_by("jax", "masks")["raised"]
    assert raised.startswith("RequestError: --engine jax cannot capture the step as one graph at ")
    assert "tests/nets/" in raised
    assert ": bright = images[images > 0.5]: " in raised
    assert "or use --engine" in raised


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="needs torch_xla")
def test_dropout_that_is_computed_again_drops_the_same() -> None:
    assert found_by("xla", "masks of dropout")["away"] == 0
