"""Freed memory is kept for the next tensor, by page faults, which do not vary."""

import sys

import pytest

from accbench import config, launchers
from tests.conftest import ROOT, Fresh

PROGRAM = """
import resource, sys
import torch
from accbench.system import malloc

kept = malloc.keep_memory() if "keep" in sys.argv else None
faults = []
for _ in range(12):  # the first find the heap too small
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40 * 2**20 // 4)  # freed at once
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(faults[-3:]), max(faults[-3:]))
"""
WITHOUT_TORCH = "from accbench.system import malloc; print(malloc.keep_memory())"


def run(program: str, *arguments: str, **env: str) -> list[str]:
    process = Fresh(["-c", program, *arguments], PYTHONPATH=str(ROOT), **env)
    assert process.wait(120) == 0
    return process.end()[0].split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_is_kept_unless_told_otherwise():
    kept, _, most = run(PROGRAM, "keep")
    if kept == "False":
        pytest.skip("not glibc")
    assert kept == "True"
    assert int(most) < 100
    _, least, most = run(PROGRAM)
    assert int(least) > 1000 or int(most) == 0  # huge pages fault less
    assert run(WITHOUT_TORCH) == ["True"]
    assert run(WITHOUT_TORCH, ACCBENCH_MALLOC="system") == ["False"]
    assert run(WITHOUT_TORCH, GLIBC_TUNABLES="glibc.malloc.arena_max=1") == ["False"]


def test_a_launcher_leaves_the_heap_alone_where_told(monkeypatch):
    task = config.parse(["--device=cpu", "--threads=1"])
    monkeypatch.delenv("ACCBENCH_MALLOC", raising=False)
    assert "GLIBC_TUNABLES" in launchers.common_env(task)
    monkeypatch.setenv("ACCBENCH_MALLOC", "system")
    assert launchers.common_env(task) == {"OMP_NUM_THREADS": "1"}
