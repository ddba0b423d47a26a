"""Reading of image files on disk."""

import errno
import os
import stat
from pathlib import Path


def read(path: str | Path) -> bytes:
    """Read all of a regular file.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    # Opening a pipe would wait, perhaps forever, until someone writes to it.
    return os.open(path, flags | os.O_NONBLOCK)
