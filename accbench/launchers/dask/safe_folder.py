"""A folder for files with untrusted names: nothing is written outside it."""

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = _WRITE | os.O_EXCL
_APPEND = (
    _WRITE | os.O_APPEND | os.O_NONBLOCK
)  # non-blocking, or opening a pipe of that name would wait


def relative_parts(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path.

    Raises:
        ValueError: the path is empty or absolute, or goes up.
    """
    parts = PurePosixPath(path).parts
    if not parts or parts[0].startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(
            f"{path!r} is not a path inside the folder: it is empty or absolute, or goes up"
        )
    return parts


class SafeFolder:
    """A folder to write into, in which no symbolic link is followed.

    Args:
        folder: created if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield the open descriptor of a file's folder, and the file's name in it.

        Raises:
            ValueError: the path leads outside the folder.
            OSError: a folder cannot be created.
        """
        *folders, name = relative_parts(path)
        current = os.open(self.folder, _OPEN_FOLDER & ~os.O_NOFOLLOW)
        try:
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=current)
                try:
                    inner = os.open(folder, _OPEN_FOLDER, dir_fd=current)
                except OSError as error:
                    message = (
                        f"{path!r}: {folder!r} is not a folder in {self.folder} ({error.strerror})"
                    )
                    raise ValueError(message) from None
                os.close(current)
                current = inner
            yield current, name
        finally:
            os.close(current)

    def append(self, path: str, data: bytes) -> None:
        """Append data to a file, which is created if it does not exist.

        Raises:
            ValueError: the path leads outside the folder, or is not a regular file.
            OSError: the file cannot be written.
        """
        with self._parent(path) as (folder, name):
            descriptor = os.open(name, _APPEND, 0o666, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ValueError(f"{path!r} is not a regular file")
                file.write(data)

    def create(self, path: str) -> "PendingFile":
        """Open a file that appears, or replaces its predecessor, when it is committed.

        Raises:
            ValueError: the path leads outside the folder.
            OSError: the file cannot be written.
        """
        with self._parent(path) as (folder, name):
            temporary = f".{name[:100]}.{uuid.uuid4().hex}.part"
            descriptor = os.open(temporary, _NEW, 0o666, dir_fd=folder)
            return PendingFile(os.dup(folder), temporary, name, descriptor)

    def remove(self, path: str) -> None:
        """Remove a file if it exists, and its folder if that is then empty.

        Raises:
            ValueError: the path leads outside the folder.
        """
        with self._parent(path) as (folder, name), contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        if len(parts := relative_parts(path)) > 1:
            parent = str(PurePosixPath(*parts[:-1]))
            with self._parent(parent) as (folder, name), contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=folder)


class PendingFile:
    """A file that is written under a temporary name in its folder."""

    def __init__(self, folder: int, temporary: str, name: str, descriptor: int) -> None:
        self._folder, self._temporary, self._name = folder, temporary, name
        self._file = os.fdopen(descriptor, "wb")

    def write(self, data: bytes) -> None:
        """Append data to the file."""
        self._file.write(data)

    def commit(self) -> None:
        """Give the file its name; a symbolic link of that name is replaced, not followed."""
        self._file.close()
        os.replace(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._folder)

    def discard(self) -> None:
        """Delete the temporary file."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._folder)
        os.close(self._folder)
