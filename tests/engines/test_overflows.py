"""The search for overflows that decides whether a step in float16 is taken."""

import json

import pytest

from tests.conftest import python
from tests.engine_params import JAX, XLA


@pytest.mark.parametrize("by", [XLA, JAX])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(by: str) -> None:
    done = python(
        "-m", "tests.engines.nonfinite_search", by, PJRT_DEVICE="CPU", JAX_PLATFORMS="cpu"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 24
    for value, place, shape, said in found:
        assert shape == [], (value, place)
        assert said == (0.0 if value == "0.0" else 1.0), (value, place)
