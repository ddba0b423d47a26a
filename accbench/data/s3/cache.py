"""A bounded folder of fetched objects, which several processes may use at once."""

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from pathlib import Path

from accbench.system import cache_folders

# A part file of this age belongs to a process that was killed.
_STALE_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def default_folder() -> Path:
    """accbench/s3 in the user's cache folder."""
    return cache_folders.folder("s3")


class BoundedCache:
    """Contents by name, the least recently used leaving first.

    A content's file is named by a hash, so no name leads outside the folder, and
    gets that name when it is whole. A full or read-only disk is no error: what
    cannot be kept is not.

    Args:
        max_bytes: the most that lies in the folder; each process may go beyond it
            by a 64th between two looks at what the others wrote.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder.absolute(), max_bytes
        self._written_since_look = max_bytes  # so that the first write looks
        self._warned = False

    def get(self, name: str, size: int) -> bytes | None:
        """The content, or None: not there, or not of this size."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != size:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return content

    def put(self, name: str, content: bytes) -> None:
        """Keep the content, if there is room for it."""
        if len(content) > self.max_bytes:
            return
        self._written_since_look += len(content)
        if self._written_since_look > self.max_bytes // 64:
            self._make_room(len(content))
        path = self._path(name)
        part = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=path.parent, suffix=".part", delete=False
            ) as temporary:
                part = Path(temporary.name)
                temporary.write(content)
            part.replace(path)
        except OSError as error:
            if part is not None:
                part.unlink(missing_ok=True)
            if error.errno in _FULL:
                self._written_since_look = self.max_bytes  # others may fill the disk: look again
            self._warn(error)

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / "objects" / digest[:2] / digest[2:]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot keep objects in {self.folder}: {error.strerror}; going on without",
                stacklevel=4,
            )

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used until nine tenths, and what comes, are free."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, also if killed
                self._evict(num_bytes)
        except OSError as error:
            self._warn(error)
        self._written_since_look = 0

    def _evict(self, num_bytes: int) -> None:
        found = []
        for path in (self.folder / "objects").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix != ".part":
                    found.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > _STALE_S:
                    path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in found)
        if total + num_bytes <= self.max_bytes:
            return
        for _, size, path in sorted(found):
            path.unlink(missing_ok=True)
            total -= size
            if total + num_bytes <= self.max_bytes * 9 // 10:
                return
