"""torch_xla is imported without TorchInductor, and has its bridge to TorchDynamo all the same."""

import json
import subprocess
import sys

import pytest

from tests.conftest import HANG_S, ROOT

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

PROGRAM = """
import inspect, json, os, sys
os.environ["PJRT_DEVICE"] = "CPU"
from accbench.engines.xla import lazy_import
torch_xla = lazy_import.torch_xla()
import torch
def is_there(): return "torch._inductor.lowering" in sys.modules
first, finders = is_there(), [type(finder).__name__ for finder in sys.meta_path]
inspect.stack()  # asks every module for its file
net = torch.nn.Linear(4, 4)
expected = net(torch.ones(2, 4)).detach()
compiled = torch.compile(net.to("xla"), backend="openxla")
away = float((compiled(torch.ones(2, 4).to("xla")).cpu() - expected).abs().max())
print(json.dumps([first, finders, away, is_there(), torch_xla is lazy_import.torch_xla()]))
"""


def test_the_bridge_comes_when_it_is_looked_into() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    first, finders, away, there, same = json.loads(done.stdout.splitlines()[-1])
    assert not first
    assert "_Finder" not in finders
    assert away < 1e-6
    assert there
    assert same
