"""/dev/shm, through which loading processes hand over batches; containers have little or none."""

import contextlib
import multiprocessing.synchronize
import re
import shutil
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accbench.data import nested
from accbench.errors import RequestError

FOLDER = Path("/dev/shm")
MORE = "docker --shm-size 8g, in Kubernetes an emptyDir of medium Memory there"
# Batches that a loading process prepares ahead (torch's default), and batches that training still
# holds: that of the step, those that an engine keeps ready, and one being copied.
_AHEAD, _HELD = 2, 4
_AMPLE_BYTES = 8 * 2**30
_SMALL_BYTES = 2**30
# torch's messages on full shared memory: before writing, and from a process that has written.
_FULL = re.compile(
    r"unable to (?:allocate|write|resize).*shared memory"
    r".*(?:No space|Read-only|Permission|temporarily unavailable)"
    r"|Bus error.*shared memory|killed by signal: Bus error",
    re.DOTALL,
)


def sizes() -> tuple[int, int] | None:
    """Return the size and the free part in bytes; None if there is no shared memory."""
    try:
        usage = shutil.disk_usage(FOLDER)
    except OSError:
        return None
    return usage.total, usage.free


def is_ample() -> bool:
    """Return whether there is enough shared memory for any number of batches."""
    size_and_free = sizes()
    return size_and_free is not None and size_and_free[1] >= _AMPLE_BYTES


def describe_now() -> str:
    """Describe in words how much shared memory there is."""
    size_and_free = sizes()
    if size_and_free is None:
        return f"there is no {FOLDER}"
    size, free = size_and_free
    return f"{FOLDER} has {_in_words(size)}, {_in_words(free)} of it free"


def described(size: int | None, free: int | None) -> str:
    """Describe the sizes in words, with what to do if they are small."""
    if size is None or free is None:
        return f"none: use --workers 0, or give the container some ({MORE})"
    text = f"{_in_words(size)}, {_in_words(free)} free"
    small = f"; large batches need more ({MORE}) or --workers 0" if free < _SMALL_BYTES else ""
    return f"{text}{small}"


def problem(batch_bytes: int, num_processes: int, num_ranks: int) -> str | None:
    """Describe what is wrong with this many loading processes; return None if there is room.

    Args:
        batch_bytes: bytes of one batch.
        num_processes: loading processes of each rank.
        num_ranks: ranks on this machine.
    """
    size_and_free = sizes()
    room = 0 if size_and_free is None else size_and_free[1] // max(1, batch_bytes * num_ranks)
    if not num_processes or room >= _AHEAD * num_processes + _HELD:
        return None
    fitting = max(0, (room - _HELD) // _AHEAD)
    return (
        f"{num_processes * num_ranks} loading processes may hold "
        f"{_in_words((_AHEAD * num_processes + _HELD) * num_ranks * batch_bytes)} of batches in "
        f"shared memory, and {describe_now()}: use --workers {fitting}, or give the container "
        f"more ({MORE})"
    )


def bytes_of(batch: Any) -> int:
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in nested.tensors_of(batch))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Replace errors for lack of shared memory in the block by one line.

    Raises:
        RequestError: replaces what torch and Python raise.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if _is_lock_error(error) or is_full(error):
            raise RequestError(shortage_message()) from error
        raise


def explain_signals() -> None:
    """Have torch's error about a dead loading process explained wherever it is raised.

    torch raises it in the main thread from a handler of SIGCHLD, which may be anywhere in a loop
    then. Call it where a loader has just started its processes.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(handler)
        or hasattr(handler, "explained")
    ):
        return

    def explaining(signal_number: int, frame: Any) -> None:
        with explained():
            handler(signal_number, frame)

    explaining.explained = handler  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, explaining)


def is_full(error: BaseException) -> bool:
    """Return whether torch reports too little shared memory."""
    return _FULL.search(str(error)) is not None


def shortage_message() -> str:
    """Return the message for loading processes that have too little shared memory."""
    return (
        f"the loading processes hand batches over in shared memory, and {describe_now()}: use "
        f"--workers 0 (num_workers=0 of a DataLoader of your own), or give the container more "
        f"({MORE})"
    )


def _is_lock_error(error: BaseException) -> bool:
    """Return whether multiprocessing could not create a lock, which needs shared memory."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, OSError) and any(
        frame.filename == multiprocessing.synchronize.__file__ for frame in last
    )


def _in_words(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
