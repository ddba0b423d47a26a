"""/dev/shm, in which loading processes hand over batches: containers have little of it, or none."""

import contextlib
import multiprocessing.synchronize
import re
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accbench.data import nested
from accbench.errors import RequestError

FOLDER = Path("/dev/shm")
MORE = "docker --shm-size 8g, in Kubernetes an emptyDir of medium Memory there"
# Batches that a loading process makes ahead (torch's default), and that training still holds: the
# one of the step, those that an engine keeps ready, and one on its way.
_AHEAD, _HELD = 2, 4
_AMPLE_BYTES = 8 * 2**30
_SMALL_BYTES = 2**30
# torch's words on shared memory that is full: before it is written, and from a process that did.
_FULL = re.compile(
    r"unable to (?:allocate|write|resize).*shared memory.*(?:No space|Read-only|Permission)"
    r"|Bus error.*shared memory|killed by signal: Bus error",
    re.DOTALL,
)


def sizes() -> tuple[int, int] | None:
    """Return the size and the free part in bytes; None where there is no shared memory."""
    try:
        found = shutil.disk_usage(FOLDER)
    except OSError:
        return None
    return found.total, found.free


def is_ample() -> bool:
    """Return whether there is so much that nobody need count."""
    found = sizes()
    return found is not None and found[1] >= _AMPLE_BYTES


def what_is_there() -> str:
    """Return in words how much shared memory there is."""
    found = sizes()
    if found is None:
        return f"there is no {FOLDER}"
    size, free = found
    return f"{FOLDER} has {_in_words(size)}, {_in_words(free)} of it free"


def described(size: int | None, free: int | None) -> str:
    """Return the sizes in words, with what to do where they are small."""
    if size is None or free is None:
        return f"none: use --workers 0, or give the container some ({MORE})"
    told = f"{_in_words(size)}, {_in_words(free)} free"
    small = f"; large batches need more ({MORE}) or --workers 0" if free < _SMALL_BYTES else ""
    return f"{told}{small}"


def problem(batch_bytes: int, num_processes: int, num_ranks: int) -> str | None:
    """Return what is wrong with so many loading processes a rank; None if there is room.

    Args:
        batch_bytes: of one batch.
        num_processes: of a rank's loader.
        num_ranks: on this machine.
    """
    found = sizes()
    room = 0 if found is None else found[1] // max(1, batch_bytes * num_ranks)
    if not num_processes or room >= _AHEAD * num_processes + _HELD:
        return None
    fitting = max(0, (room - _HELD) // _AHEAD)
    return (
        f"{num_processes * num_ranks} loading processes may hold "
        f"{_in_words((_AHEAD * num_processes + _HELD) * num_ranks * batch_bytes)} of batches in "
        f"shared memory, and {what_is_there()}: use --workers {fitting}, or give the container "
        f"more ({MORE})"
    )


def bytes_of(batch: Any) -> int:
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in nested.tensors_of(batch))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say in one line where a block fails for want of shared memory.

    Raises:
        RequestError: in the place of what torch and Python raise then.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if _is_locks_own(error) or is_full(error):
            raise RequestError(wanting()) from error
        raise


def is_full(error: BaseException) -> bool:
    """Return whether torch says that there is too little shared memory."""
    return _FULL.search(str(error)) is not None


def wanting() -> str:
    """Return the line for loading processes that have too little shared memory."""
    return (
        f"the loading processes hand batches over in shared memory, and {what_is_there()}: use "
        f"--workers 0 (num_workers=0 of a DataLoader of your own), or give the container more "
        f"({MORE})"
    )


def _is_locks_own(error: BaseException) -> bool:
    """Return whether multiprocessing could not make a lock, which lies in shared memory."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, OSError) and any(
        frame.filename == multiprocessing.synchronize.__file__ for frame in last
    )


def _in_words(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
