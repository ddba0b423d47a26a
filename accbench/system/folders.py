"""Run folders, cache folders, and locks that keep a folder to one process."""

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


def create_run_folder(name: str) -> Path:
    """Create runs/<time>-NAME; append a number if another process has created that already.

    Raises:
        OSError: it cannot be created.
    """
    first = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)  # of two processes that try, one fails
            return folder
    raise AssertionError


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a folder until the block or this process ends, also if the process is killed.

    Raises:
        RequestError: another process has locked the folder.
        OSError: it cannot be written.
    """
    _release_in_forks()
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open_locks.add(descriptor)
    try:
        _acquire(descriptor, folder)
        yield
    finally:
        _open_locks.discard(descriptor)
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"another process is at work in {folder}; wait for it, or choose another --output_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:  # some network file systems
            raise


def _release_all() -> None:
    # The lock lives as long as any process has the locked file open. A started program closes the
    # file (O_CLOEXEC); a fork of this process has to close it here.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()


@functools.cache
def _release_in_forks() -> None:
    os.register_at_fork(after_in_child=_release_all)  # once, and not on import
