"""Commands as a container runs them: as a user without a name, between file systems of its own."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import HANG_S, ROOT

UID = 12345
_STAGE = "/mnt"


@cache
def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "only root starts processes of other users"
    if not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return "unshare, setpriv or mount is not installed"
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", _STAGE])
    return "mounting is not allowed here" if done.returncode else None


def run(
    arguments: Sequence[object], work: Path, *, mounts: Sequence[str] = (), **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in `work`, which it owns, with an empty /tmp and nothing but `env`.

    Args:
        mounts: shell commands as root in the mount namespace, before it starts.
    """
    if (why := _why_not()) is not None:
        pytest.skip(why)
    os.chown(work, UID, UID)
    python = [sys.executable, *map(str, arguments)]
    user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *python]
    lines = [*_own_file_systems(work), *mounts, f"cd {work}", f"exec {shlex.join(user)}"]
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}
    return subprocess.run(
        ["unshare", "-m", "sh", "-ec", "\n".join(lines)], capture_output=True, text=True,
        env={**inherited, "PYTHONPATH": str(ROOT), **env}, timeout=HANG_S,
    )  # fmt: skip


_INHERITED = (
    "PATH", "LD_LIBRARY_PATH", "XLA_FLAGS", "TORCHINDUCTOR_VEC_ISA_OK", "OMP_WAIT_POLICY",
    "TORCHINDUCTOR_COMPILE_THREADS",
)  # fmt: skip


def _own_file_systems(work: Path) -> list[str]:
    """Hide /tmp, and folders that the user cannot pass, but for what is needed of them."""
    needed = [*dict.fromkeys((ROOT, work, Path(sys.prefix), Path(sys.base_prefix)))]
    hidden = {"/tmp"}
    for path in needed:
        closed = (p for p in reversed(path.parents) if not p.stat().st_mode & 1)
        hidden.add(str(next(closed, "/tmp")))
    hidden = {path for path in hidden if not any(str(p) in hidden for p in Path(path).parents)}
    moved = [path for path in needed if any(path.is_relative_to(h) for h in hidden)]
    lines = [f"mount -t tmpfs tmpfs {_STAGE}"]
    for number, path in enumerate(moved):
        lines += [f"mkdir {_STAGE}/{number}", f"mount --bind {path} {_STAGE}/{number}"]
    lines += [f"mount -t tmpfs -o mode=1777 tmpfs {path}" for path in sorted(hidden)]
    for number, path in enumerate(moved):
        lines += [f"mkdir -p {path}", f"mount --move {_STAGE}/{number} {path}"]
    return [*lines, f"umount {_STAGE}"]


def read_only(*folders: object) -> list[str]:
    """Commands after which nobody writes into these, which are mounts or become ones."""
    lines = []
    for path in folders:
        lines += [f"mount --rbind {path} {path}", f"mount -o remount,bind,ro {path}"]
    return lines
