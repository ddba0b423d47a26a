"""A disk that is full while inductor compiles, as one line.

It is an error of Python's where torch writes, and a message of the C++ compiler's where that does.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accbench.errors import DISK_FULL, RequestError, errors_behind


@contextlib.contextmanager
def reported(cache_folder: str) -> Iterator[None]:
    """Replace what the block raises because a disk is full.

    Args:
        cache_folder: inductor's; precompiled headers and the compiler's own files are in the
            temporary folder.

    Raises:
        RequestError: it names the fuller one of the two folders, and what to do.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RequestError) or not is_cause(error):
            raise
        folder, remedy = _full_folder(cache_folder)
        raise RequestError(
            f"no space left on device in {folder}, which torch.compile writes to: free some there, "
            f"or {remedy} on another disk"
        ) from error


def is_cause(error: BaseException) -> bool:
    """Return whether an error was raised because a disk, or a user's quota, is full."""
    return any(
        cause.errno in DISK_FULL
        if isinstance(cause, OSError)
        else type(cause).__name__ == "CppCompileError"  # to import it would make the cache folder
        and any(os.strerror(number) in str(cause) for number in DISK_FULL)
        for cause in errors_behind(error)
    )


def _full_folder(cache_folder: str) -> tuple[str, str]:
    """Return the fuller one of the folders that are written, and what names another."""
    temporary = tempfile.gettempdir()
    cache_device, cache_free = _device_and_free_bytes(cache_folder)
    device, free = _device_and_free_bytes(temporary)
    setting = "--inductor.cache_dir"
    if device == cache_device:
        return cache_folder, f"set {setting} and TMPDIR to folders"
    if free < cache_free:
        return temporary, "set TMPDIR to a folder"
    return cache_folder, f"set {setting} to a folder"


def _device_and_free_bytes(folder: str) -> tuple[int, int]:
    """Return the number of a folder's device and its free space; the folder need not exist."""
    existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return existing.stat().st_dev, shutil.disk_usage(existing).free
