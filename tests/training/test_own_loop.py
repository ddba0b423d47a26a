"""What ordinary loops do to ordinary models, which an engine has to follow."""

import importlib.util
import json
import shutil

import pytest

from tests.conftest import python

ENGINES = (
    "ddp",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++")),
    pytest.param("jax", marks=pytest.mark.skipif(
        not importlib.util.find_spec("jax"), reason="no jax")),
    pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.skipif(
        not importlib.util.find_spec("torch_xla"), reason="no torch_xla")]),
)  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_weights_are_those_of_the_plain_loop(engine, tmp_path):
    done = python("-m", "tests.training.own_loop", engine, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found["plain"]) == 8 + 2
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["far"] < 1e-5


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="no torch_xla")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "nadam", "adadelta"])
def test_optimizers_go_on_from_a_plain_ones_state_and_plain_ones_from_theirs(name, when, tmp_path):
    done = python("-m", "tests.training.own_optimizer", name, when, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found["plain"]) == 4
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["far"] < 1e-6
