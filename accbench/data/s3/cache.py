"""A cache folder of limited size for fetched objects, which several processes may share."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from pathlib import Path

from accbench.errors import DISK_FULL
from accbench.system import cache_folders

# A part file older than this belongs to a process that was killed.
_STALE_S = 3600.0


def default_folder() -> Path:
    """Return accbench/s3 in the user's cache folder."""
    return cache_folders.folder("s3")


class BoundedCache:
    """Contents by name; the least recently used are deleted first.

    A content's file is named by a hash, so that no name leads outside the folder, and gets that
    name when it is complete. A full or read-only disk is not an error: contents are then not
    stored.

    Args:
        folder: the cache's folder.
        max_bytes: the folder's maximum size; each process may exceed it by a 64th between two scans
            of the folder.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder.absolute(), max_bytes
        self._written_since_scan = max_bytes  # so that the first write scans the folder
        self._warned = False

    def get(self, name: str, size: int) -> bytes | None:
        """Return the content; None if it is missing or has another size."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != size:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks it as used now
        return content

    def put(self, name: str, content: bytes) -> None:
        """Store the content, if there is room for it."""
        if len(content) > self.max_bytes:
            return
        self._written_since_scan += len(content)
        if self._written_since_scan > self.max_bytes // 64:
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
            if error.errno in DISK_FULL:
                # Others may have filled the disk: scan again.
                self._written_since_scan = self.max_bytes
            self._warn(error)

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / "objects" / digest[:2] / digest[2:]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot store objects in {self.folder}: {error.strerror}; going on without",
                stacklevel=4,
            )

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used contents until nine tenths suffice for what is stored."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, also if killed
                self._evict(num_bytes)
        except OSError as error:
            self._warn(error)
        self._written_since_scan = 0

    def _evict(self, num_bytes: int) -> None:
        files = []
        for path in (self.folder / "objects").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix != ".part":
                    files.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > _STALE_S:
                    path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in files)
        if total + num_bytes <= self.max_bytes:
            return
        for _, size, path in sorted(files):
            path.unlink(missing_ok=True)
            total -= size
            if total + num_bytes <= self.max_bytes * 9 // 10:
                return
