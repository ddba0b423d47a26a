"""The lowered training step as eight workers would run it, read as HLO text."""

import math
import re
from typing import Any

import pytest

from .test_xla_replay import answer_of, start

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


# %name = type operation(operands)
OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \S+ ([\w-]+)\((.*?)\)")


def names(operands: str) -> set[str]:
    return {operand.split()[-1].lstrip("%") for operand in operands.split(", ") if operand}


@pytest.fixture(scope="module", params=["O0", "float16"])
def graph(request: pytest.FixtureRequest) -> dict[str, Any]:
    # A process alone leaves all-reduces out of its graph unless it is told not to.
    return answer_of(start("graph", request.param, XLA_ALWAYS_ALLREDUCE="1"))


def all_reduces(graph: dict[str, Any]) -> list[str]:
    return [line for line in graph["hlo"].splitlines() if " all-reduce(" in line]


def test_one_all_reduce_carries_every_gradient_in_float32(graph: dict[str, Any]) -> None:
    (line,) = all_reduces(graph)
    result = line.split(" all-reduce(")[0]
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in shapes]
    assert {dtype for dtype, _ in shapes} == {"f32"}
    # the gradients, and the token that orders collectives, a number
    assert len(shapes) == graph["parameters"] + 1
    assert 4 * (sum(sizes) - 1) == graph["bytes"]


def test_it_is_over_all_replicas_and_sums(graph: dict[str, Any]) -> None:
    (line,) = all_reduces(graph)
    assert "replica_groups={}" in line  # nobody is left out
    reducer = re.search(r"to_apply=%?([\w.]+)", line)
    assert reducer is not None
    body = graph["hlo"].split(f"{reducer[1]} ", 1)[1].split("}", 1)[0]
    assert " add(" in body


def test_every_gradient_is_divided_by_eight(graph: dict[str, Any]) -> None:
    lines = graph["hlo"].splitlines()
    operations = [match.groups() for line in lines if (match := OPERATION.search(line))]
    eighths = {
        name for name, kind, operands in operations if (kind, operands) == ("constant", "0.125")
    }
    for name, kind, operands in operations:  # in order: what is used comes first
        if kind in ("broadcast", "convert", "reshape") and names(operands) & eighths:
            eighths.add(name)
    scaled = [kind for _, kind, operands in operations if names(operands) & eighths]
    assert scaled.count("multiply") == graph["parameters"]


def test_nothing_in_the_step_goes_to_the_host(graph: dict[str, Any]) -> None:
    operations = set(re.findall(r" = \S+ ([\w-]+)\(", graph["hlo"]))
    assert "multiply" in operations
    assert not operations & {"infeed", "outfeed", "send", "recv", "custom-call"}
