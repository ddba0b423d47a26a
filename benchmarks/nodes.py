"""Make two nodes of one machine.

They are network namespaces with an address each where root and iproute2 allow it, else two
launchers on the loopback.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.processes import ROOT, free_port

TIMEOUT_S = 900
"""After so long a node hangs; on a busy machine imports alone take minutes."""

_UNSHARED = ("unshare", "-m")
MAY_HIDE = (
    shutil.which("unshare") is not None
    and subprocess.run([*_UNSHARED, "true"], capture_output=True).returncode == 0
)
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Nodes:
    """Start commands on two nodes, 0 and 1."""

    def __init__(
        self, names: tuple[str, str] | None, loopback: str = "127.0.0.1",
        hidden: Path | None = None,
    ) -> None:  # fmt: skip
        self.names = names
        self.host = loopback if names is None else ADDRESSES[0]
        self.port = free_port() if names is None else 29400
        self.hidden = hidden
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, node: int, *flags: object, to_do: tuple[str, ...] = ("launch_single_task.py",)
    ) -> "subprocess.Popen[str]":
        """Start a run, or another command, on a node."""
        inside = [] if self.names is None else ["ip", "netns", "exec", self.names[node]]
        if self.hidden is not None and node:
            inside += [*_UNSHARED, "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']
            inside.append(str(self.hidden))
        arguments = (
            "--nnodes=2", f"--node_rank={node}", f"--rdzv_endpoint={self.host}:{self.port}", *flags
        )  # fmt: skip
        process = self.start_python(node, inside, [*to_do, *map(str, arguments)])
        self.started.append(process)
        return process

    def start_python(
        self, node: int, inside: Sequence[str], words: Sequence[str]
    ) -> "subprocess.Popen[str]":
        """Start `python WORDS` by a command that runs others inside of a node."""
        return subprocess.Popen(
            [*inside, sys.executable, *words], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *flags: object) -> list[tuple[int, str, str]]:
        """Run on both to the end; return exit status, output and errors of each."""
        return [ended(process) for process in [self.start(node, *flags) for node in (0, 1)]]

    def cut(self) -> None:
        """Cut the link between the namespaces."""
        assert self.names is not None
        _ip("-n", self.names[0], "link", "set", "veth", "down")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a node; return its exit status, output and errors."""
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


@contextlib.contextmanager
def on_loopback(host: str, hidden: Path) -> Iterator[Nodes]:
    """Yield two nodes on the loopback; the second sees `hidden` as an empty folder."""
    found = Nodes(None, host, hidden)
    try:
        yield found
    finally:
        found.end()


@contextlib.contextmanager
def two_nodes(kind: type[Nodes] = Nodes) -> Iterator[Nodes]:
    """Yield two nodes, in namespaces where that is allowed."""
    names = (f"accbench-{os.getpid()}-0", f"accbench-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        found = kind(names if _namespaces(names, stack) else None)
        stack.callback(found.end)
        yield found


def _namespaces(names: tuple[str, str], stack: contextlib.ExitStack) -> bool:
    """Create two linked namespaces; return whether this machine allows it."""
    if shutil.which("ip") is None:
        return False
    for name in names:
        if not _ip("netns", "add", name):
            return False
        stack.callback(_ip, "netns", "del", name)
    pair = ("link", "add", "name", "veth", "netns", names[0], "type", "veth")
    if not _ip(*pair, "peer", "name", "veth", "netns", names[1]):
        return False
    for name, address in zip(names, ADDRESSES, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
        _ip("-n", name, "link", "set", "veth", "up")
        _ip("-n", name, "link", "set", "lo", "up")
    return True


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


def logs_of(run_dir: Path) -> list[str]:
    """Return the names of a run's log files."""
    return sorted(path.name for path in (run_dir / "logs").iterdir())
