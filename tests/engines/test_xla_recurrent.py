"""Recurrent layers through XLA are those of PyTorch, as loops."""

import json

import pytest

from tests.conftest import python

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def test_outputs_and_gradients_are_torchs_and_the_length_does_not_matter() -> None:
    flags = "--xla_backend_optimization_level=0"  # compiles in half the time
    done = python(
        "-m", "tests.engines.xla_recurrent", PJRT_DEVICE="CPU", NPROC="1", XLA_FLAGS=flags
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["far"].values()) < 1e-5, found["far"]
    assert len(found["far"]) == 12
    for short, long in found["sizes"]:
        assert short == long  # instructions, of which there would be ten times as many unrolled
