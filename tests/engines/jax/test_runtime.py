"""What engine jax sets in JAX before it is used."""

from importlib.util import find_spec

import pytest

from tests.conftest import python

PROGRAM = """
from pathlib import Path
from accbench.engines.jax import runtime
runtime.configure("cpu", "")
import jax
print(jax.devices()[0].platform, "xla_cuda_plugin.so" in Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="no plug-in of JAX's is installed")
def test_a_run_on_a_cpu_loads_no_plug_in():
    done = python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "False"]
    assert done.stderr == ""
