"""LSTMs through XLA are those of PyTorch, as loops."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import HANG_S, ROOT

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def test_outputs_and_gradients_are_torchs_and_the_length_does_not_matter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.xla_lstm"], cwd=ROOT, text=True,
        capture_output=True, timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "NPROC": "1",
             "TORCH_WARM_POOL": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["far"].values()) < 1e-5, found["far"]
    assert len(found["far"]) == 4
    short, long = found["sizes"]
    assert short == long  # instructions, of which there would be ten times as many unrolled
