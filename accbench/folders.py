"""Folders that one process has to itself."""

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from accbench.errors import RequestError

LOCK_FILE = ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_open_locks: set[int] = set()


def new(name: str) -> Path:
    """Make runs/<time>-NAME, with a number behind it where another process was first.

    Raises:
        OSError: it cannot be made.
    """
    first = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)  # of two that try, one fails
            return folder
    raise AssertionError


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out until the block or this process ends, also if it is killed.

    Raises:
        RequestError: another process has the folder.
        OSError: it cannot be written.
    """
    _let_go_in_copies()
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open_locks.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        _open_locks.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"another process is at work in {folder}; wait for it, or choose another --output_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:  # some network file systems
            raise


def _let_go() -> None:
    # The lock lives as long as any process has the file open that took it. Programs that
    # are started close it, copies of this process have to.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()


@functools.cache
def _let_go_in_copies() -> None:
    os.register_at_fork(after_in_child=_let_go)  # once, and not on import
