"""How a worker's process ends that has, or had, a process group.

Gloo's threads abort a process that Python takes apart while they live ("terminate called without an
active exception"). So such a process does what Python does at its end, and then leaves at once.
"""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading

import torch.distributed as dist

from accbench.distributed import process_group

# Files whose end is written when they close.
_ARCHIVES = (
    ("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"),
)  # fmt: skip


def leave_at_once(status: int) -> None:
    """End this process after an error, if it has an open process group, without a crash.

    The other ranks may be gone, so the group cannot be closed; and while it is open, Gloo's
    threads abort a process that ends normally, about once in twenty times on a busy machine.
    """
    if dist.is_initialized():
        _end_process(status)


def close_and_end(status: int) -> None:
    """Leave the process group and end this process; returns where there is none.

    The group's threads live on where something of a script's still holds it, such as a model in
    DistributedDataParallel, and abort a process that ends normally.
    """
    if not dist.is_initialized():
        return
    threading._shutdown()  # type: ignore[attr-defined]  # ends executors and waits, as Python does
    process_group.close()
    _end_process(status)


def _end_process(status: int) -> None:
    atexit._run_exitfuncs()  # among them multiprocessing's, which ends data loading processes
    _write_open_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write_open_files() -> None:
    """Write what files hold that a script has left open, as Python does at its end."""
    archives = tuple(
        getattr(sys.modules[module], name) for module, name in _ARCHIVES if module in sys.modules
    )
    texts, binaries = (io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)
    are_files = _AreFiles((*texts, *archives, *binaries))
    gc.unfreeze()  # an exit function of ours freezes all objects, which the list then lacks
    files = [one for one in gc.get_objects() if are_files[type(one)]]
    for kinds in (texts, archives, binaries):  # each writes into those behind it
        for file in [one for one in files if issubclass(type(one), kinds)]:
            with contextlib.suppress(Exception):  # it is closed, or its disk full
                file.close() if kinds is archives else file.flush()


class _AreFiles(dict[type, bool]):
    """Type -> whether its objects are files. There are few types among a million objects."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        super().__init__()
        self._kinds = kinds

    def __missing__(self, kind: type) -> bool:
        self[kind] = found = issubclass(kind, self._kinds)
        return found
