"""Files that others name, written below one folder and nowhere else."""

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = _WRITE | os.O_EXCL
_APPEND = _WRITE | os.O_APPEND | os.O_NONBLOCK  # or a pipe of that name would be waited for


def parts_of(path: str) -> tuple[str, ...]:
    """The names in a path that leads down.

    Raises:
        ValueError: it is empty or absolute, or goes up.
    """
    parts = PurePosixPath(path).parts
    if not parts or parts[0].startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is no path below a folder: it is empty or absolute, or goes up")
    return parts


class Below:
    """A folder to write into; no link within it is followed, wherever it leads.

    Args:
        folder: made where it is not there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The folder that a file is in, open, and the file's name there.

        Raises:
            ValueError: the path leads elsewhere.
            OSError: a folder cannot be made.
        """
        *folders, name = parts_of(path)
        opened = os.open(self.folder, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=opened)
                try:
                    inner = os.open(folder, _FOLDER, dir_fd=opened)
                except OSError as error:
                    why = f"{path!r}: {folder!r} is no folder in {self.folder} ({error.strerror})"
                    raise ValueError(why) from None
                os.close(opened)
                opened = inner
            yield opened, name
        finally:
            os.close(opened)

    def append(self, path: str, data: bytes) -> None:
        """Add to a file, which is made where it is not there.

        Raises:
            ValueError: the path leads elsewhere.
            OSError: it cannot be written.
        """
        with self._parent(path) as (folder, name):
            descriptor = os.open(name, _APPEND, 0o666, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ValueError(f"{path!r} is no file")
                file.write(data)

    def begin(self, path: str) -> "Unfinished":
        """A file that is not there, or still the one before, until it is finished.

        Raises:
            ValueError: the path leads elsewhere.
            OSError: it cannot be written.
        """
        with self._parent(path) as (folder, name):
            unfinished = f".{name[:100]}.{uuid.uuid4().hex}.part"
            descriptor = os.open(unfinished, _NEW, 0o666, dir_fd=folder)
            return Unfinished(os.dup(folder), unfinished, name, descriptor)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there, and the folder that it leaves empty.

        Raises:
            ValueError: the path leads elsewhere.
        """
        with self._parent(path) as (folder, name), contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        if len(parts := parts_of(path)) > 1:
            parent = str(PurePosixPath(*parts[:-1]))
            with self._parent(parent) as (folder, name), contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=folder)


class Unfinished:
    """A file under another name beside its own."""

    def __init__(self, folder: int, unfinished: str, name: str, descriptor: int) -> None:
        self._folder, self._unfinished, self._name = folder, unfinished, name
        self._file = os.fdopen(descriptor, "wb")

    def write(self, data: bytes) -> None:
        """Add to it."""
        self._file.write(data)

    def finish(self) -> None:
        """Give it its name; a link of that name is replaced, not followed."""
        self._file.close()
        os.replace(self._unfinished, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._folder)

    def drop(self) -> None:
        """Leave nothing of it."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished, dir_fd=self._folder)
        os.close(self._folder)
