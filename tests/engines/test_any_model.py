"""Models of many kinds in each engine: they train as plain PyTorch in float64 has them train."""

import importlib.util
import json
from functools import cache

import pytest

from tests.conftest import python
from tests.engine_params import INDUCTOR, JAX, XLA
from tests.engines.any_model import MODELS

ENGINES = (pytest.param("ddp"), INDUCTOR, XLA, JAX)


# Of them more is asked than that they train; inductor takes seconds for each of the others.
TOLD_OF = ("shared_memory", "masks")
# JAX captures the first three as it does tied_deep, returns_dict and computed_again; the last is of
# operations that have tests of their own.
LIKE_OTHERS = ("tied", "returns_tuple", "checkpointed", "ranged")
# Engine -> models that have a process apart from the others', which need not wait for them.
APART = {"inductor": TOLD_OF, "jax": LIKE_OTHERS}


def found_by(engine: str, model: str) -> dict:
    """What came of a model."""
    apart = APART.get(engine, ())
    models = (name for name in MODELS if (name in apart) == (model in apart))
    return _found_by(engine, *models)[model]


@cache
def _found_by(engine: str, *models: str) -> dict:
    done = python("-m", "tests.engines.any_model", engine, *models, NPROC="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def marks_of(engine: str, model: str) -> list:
    is_long = engine == "inductor" or (engine == "jax" and model in LIKE_OTHERS)
    return [pytest.mark.soak] if is_long else []


@pytest.mark.parametrize(("model", "engine"), [
    pytest.param(model, *engine.values, marks=[*engine.marks, *marks_of(*engine.values, model)])
    for model in MODELS if model not in TOLD_OF for engine in ENGINES
])  # fmt: skip
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
