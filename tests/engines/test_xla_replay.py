"""Replayed steps beside traced ones: the same numbers, to the last bit."""

import json
from typing import Any

import pytest

from tests.conftest import HANG_S, start_python
from tests.forked import Forked, Fresh

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def start(*arguments: str, **env: str) -> Forked | Fresh:
    return start_python("-m", "tests.engines.xla_steps", *arguments, NPROC="1", **env)


def answer_of(process: Forked | Fresh) -> dict[str, Any]:
    process.wait(HANG_S)
    stdout, stderr = process.end()
    assert process.returncode == 0, stderr
    answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return answer


def both(program: str, argument: str) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = answer_of(start(program, argument))
    return answer["off"], answer["on"]


@pytest.mark.parametrize("amp", [pytest.param("O0", marks=pytest.mark.soak), "float16"])
def test_fifty_steps_are_bit_for_bit_the_traced_ones(amp: str) -> None:
    """Dropout, a changing learning rate and weight decay, short batches, evaluations in
    between, a frozen layer, a model and an optimizer loaded; in float16 overflows."""
    traced, replayed = both("long", amp)
    assert replayed["numbers"] == traced["numbers"]
    assert traced["replayed"] == 0
    assert replayed["replayed"] >= 20  # the others were recorded, or traced where a rate was 0
    # 50 steps, the last 10 of them from the optimizer's state after 20; overflows skip some
    assert traced["applied"] == replayed["applied"]
    assert (traced["applied"] < 30) == (amp == "float16")


def test_a_step_that_leaves_the_compiler_is_traced_and_right() -> None:
    traced, replayed = both("odd", "fallback")
    assert replayed["numbers"] == traced["numbers"]
    assert replayed["replayed"] == 0
    assert replayed["given_up"] == "an operation of the step left the compiler for the host"


def test_a_step_that_writes_elsewhere_is_traced_and_right() -> None:
    traced, replayed = both("odd", "outside")
    assert replayed["numbers"] == traced["numbers"]
    assert replayed["replayed"] == 0
    assert replayed["given_up"] == "the step changes 1 tensors outside of model and optimizer"


def test_a_step_that_python_changes_is_found_out_when_it_is_recorded_again() -> None:
    _, replayed = both("python", "4")
    assert replayed["given_up"] == "step after step was another graph"
    assert replayed["replayed"] == 97  # of the first 99, all but the two recordings
