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


def run(*arguments: str, **env: str) -> tuple[str, int, int]:
    process = Fresh(["-c", PROGRAM, *arguments], PYTHONPATH=str(ROOT), **env)
    assert process.wait(120) == 0
    kept, least, most = process.end()[0].split()
    return kept, int(least), int(most)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_is_kept_unless_told_otherwise():
    kept, _, most = run("keep")
    if kept == "False":
        pytest.skip("not glibc")
    assert (kept, most < 100) == ("True", True)
    _, least, _ = run()
    assert least > 1000 or most == 0  # huge pages fault less
    assert run("keep", ACCBENCH_MALLOC="system")[0] == "False"
    assert run("keep", GLIBC_TUNABLES="glibc.malloc.arena_max=1")[0] == "False"


def test_a_launcher_leaves_the_heap_alone_where_told(monkeypatch):
    task = config.parse(["--device=cpu", "--threads=1"])
    monkeypatch.delenv("ACCBENCH_MALLOC", raising=False)
    assert "GLIBC_TUNABLES" in launchers.common_env(task)
    monkeypatch.setenv("ACCBENCH_MALLOC", "system")
    assert launchers.common_env(task) == {"OMP_NUM_THREADS": "1"}
