"""A node's launcher that forks its agent, which forks the workers: none imports torch anew.

    python -m tests.launchers.elastic.forked_node NAMESPACE launch_single_task.py FLAGS...

NAMESPACE is a network namespace's name, or - for the one that this process is in.
"""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accbench.launchers import elastic
from tests import forked, started

_NAMESPACES = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000  # setns(2)
_AGENT = ["-m", "tests.launchers.elastic.forked_agent"]


class _ForkedAgent(subprocess.Popen[bytes]):
    """The agent's process, forked instead of started."""

    def __init__(self, arguments: list[str], env: dict[str, str], stderr: int, **_: Any) -> None:
        self._environment, self._stderr = env, stderr
        super().__init__(arguments)

    def _execute_child(self, arguments: list[str], *_: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which here only wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.dup2(self._stderr, 2)
            folder_and_launcher = arguments[-2:]
            forked._become_worker([*_AGENT, *folder_and_launcher], self._environment)
        self.pid, self._child_created = pid, True


def enter(namespace: str) -> None:
    """Have this process, and those that it starts, be in a network namespace."""
    if namespace == "-":
        return
    libc, descriptor = (
        ctypes.CDLL(None, use_errno=True),
        os.open(_NAMESPACES / namespace, os.O_RDONLY),
    )
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    enter(sys.argv[1])
    # torch elastic sets it for workers, and one with another environment would start anew.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    forked.fork_workers()
    elastic.subprocess = SimpleNamespace(Popen=_ForkedAgent)  # type: ignore[attr-defined]
    started.run(sys.argv[2:])
