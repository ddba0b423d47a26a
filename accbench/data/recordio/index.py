"""The offsets of the records in a .rec file: from its .idx file, or by scanning.

A large index is stored as a binary file in the user's cache folder and memory-mapped: tens of
millions of records then cost a process almost nothing, and all processes of a machine share them.
"""

import bisect
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from accbench.data.recordio import file as recordio_file
from accbench.data.recordio.file import DamagedRecordError, RecordFile
from accbench.errors import RequestError
from accbench.system import cache_folders

_CHUNK_BYTES = 1 << 22
# A shorter index is read each time, in a few hundredths of a second.
CACHED_FROM = 200_000


class Index:
    """Keys and offsets of records, ordered by key; pickled by its file's name if it has one."""

    def __init__(self, table: np.ndarray, path: Path | None = None) -> None:
        self._table, self._path = table, path  # (num_records, 2) int64: key, offset

    def __len__(self) -> int:
        return len(self._table)

    def position(self, key: int) -> int | None:
        """Return the position of a key in the index; None if it is missing."""
        # Not numpy's search, which would copy the column out of the mapped file.
        positions = range(len(self))
        position = bisect.bisect_left(positions, key, key=lambda at: int(self._table[at, 0]))
        has_key = position < len(self) and self._table[position, 0] == key
        return position if has_key else None

    def offset(self, position: int) -> int:
        """Return the offset in the file of the `position`th record."""
        return int(self._table[position, 1])

    @property
    def keys(self) -> np.ndarray:
        """(num_records,) int64, ascending."""
        return self._table[:, 0]

    @property
    def offsets(self) -> np.ndarray:
        """(num_records,) int64."""
        return self._table[:, 1]

    def __reduce__(self) -> tuple[object, ...]:
        return (_mapped, (self._path,)) if self._path else (Index, (self._table,))


def _mapped(path: Path) -> Index:
    return Index(np.memmap(path, "<i8", mode="r").reshape(-1, 2), path)


def index_of(file: RecordFile, idx_path: Path | None = None) -> Index:
    """Return the index of a .rec file.

    Args:
        file: the .rec file.
        idx_path: its .idx file; None for `FILE.idx` beside it. If there is no such file, the .rec
            file is scanned.

    Raises:
        RequestError: the index is damaged or does not fit the file, or the file
            has no index and is damaged.
    """
    idx_path = idx_path or file.path.with_suffix(".idx")
    cached = _cache_file(file, idx_path)
    if cached.exists():
        try:
            return _mapped(cached)
        except (OSError, ValueError):  # truncated: rebuilt below
            cached.unlink(missing_ok=True)

    def rows() -> Iterator[np.ndarray]:
        if not idx_path.exists():
            return _scan(file)
        return _checked(_read(idx_path), file, idx_path)

    try:
        return _collect(rows(), cached)
    except _UnsortedError:
        return _sort(np.concatenate(list(_read(idx_path))), file, idx_path)
    except OSError:  # the cache file cannot be written
        return _collect(rows(), None)


class _UnsortedError(Exception):
    """A key is not larger than the one before it."""


def _checked(
    tables: Iterator[np.ndarray], file: RecordFile, idx_path: Path
) -> Iterator[np.ndarray]:
    """Pass rows of key and offset through, and check at their end that they fit the file."""
    first, last, key = 1 << 62, 0, -1
    for table in tables:
        first, last = min(first, int(table[:, 1].min())), max(last, int(table[:, 1].max()))
        if (np.diff(table[:, 0], prepend=key) <= 0).any():
            raise _UnsortedError
        key = int(table[-1, 0])
        yield table
    _check_fit(first, last, file, idx_path)


def _read(path: Path) -> Iterator[np.ndarray]:
    """Yield chunks, (num_lines, 2) int64, of the text `key TAB offset NEWLINE`."""
    num_lines, rest = 0, b""
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if not chunk:
                lines, newline, rest = rest, b"\n" if rest else b"", b""
            if newline:
                table = _numbers(lines, path, num_lines)
                num_lines += len(table)
                yield table
            if not chunk:
                break
    if not num_lines:
        raise RequestError(f"{path} is empty; delete it, and the index is made from the .rec file")


def _numbers(lines: bytes, path: Path, lines_before: int) -> np.ndarray:
    num_lines = lines.count(b"\n") + 1
    strange = lines.translate(None, b"0123456789\t\r\n")
    # fromstring reads 30 million numbers a second, but accepts any white space as a separator.
    if not strange and lines.count(b"\t") == num_lines and b"\t\n" not in lines:
        numbers = np.fromstring(lines, np.int64, sep=" ")
        if len(numbers) == 2 * num_lines and lines[:1] != b"\t" and b"\n\t" not in lines:
            return numbers.reshape(-1, 2)
    for number, line in enumerate(lines.split(b"\n"), start=lines_before + 1):
        key, _, offset = line.strip(b"\r").partition(b"\t")
        if not (key.isdigit() and offset.isdigit() and len(line) < 38):
            shown = line[:40].decode(errors="replace")
            raise RequestError(
                f"{path}, line {number}: {shown!r} is not `key TAB offset`; delete the file, "
                "and the index is made from the .rec file"
            )
    raise RequestError(f"{path}, from line {lines_before + 1}: these are not lines of numbers")


def _sort(table: np.ndarray, file: RecordFile, path: Path) -> Index:
    """Sort the rows by key in memory; writers of large files write them in order."""
    _check_fit(int(table[:, 1].min()), int(table[:, 1].max()), file, path)
    table = table[np.argsort(table[:, 0], kind="stable")]
    equal = np.diff(table[:, 0]) == 0
    if equal.any():
        raise RequestError(f"{path} has the key {int(table[int(np.argmax(equal)), 0])} twice")
    return Index(table)


def _check_fit(first: int, last: int, file: RecordFile, idx_path: Path) -> None:
    """Check that an index fits its file.

    Args:
        first: the smallest offset in the index.
        last: the largest offset in the index.
        file: the .rec file.
        idx_path: the .idx file, for messages.
    """
    if last >= file.num_bytes:
        raise RequestError(
            f"{idx_path} has a record at offset {last}, but {file.path} ends at "
            f"{file.num_bytes}: one of them is cut short, or they do not belong together"
        )
    problem = None
    if first != 0:
        problem = f"its first record is at offset {first}"
    else:
        try:
            _, end = recordio_file.record_at(file.view(), last)
        except DamagedRecordError:
            return  # a damaged sample, reported when it is read
        if end != file.num_bytes:
            problem = f"its last record ends at {end} and the file at {file.num_bytes}"
    if problem is not None:
        raise RequestError(
            f"{idx_path} does not fit {file.path}: {problem}; delete the .idx file, and the "
            "index is made from the .rec file"
        )


def _scan(file: RecordFile) -> Iterator[np.ndarray]:
    record_offsets, begin = recordio_file.offsets(file.view()), 0
    while True:
        try:
            chunk = np.fromiter(itertools.islice(record_offsets, CACHED_FROM), np.int64)
        except DamagedRecordError as error:
            raise RequestError(
                f"{file.path} has no .idx file and cannot be indexed: {error}; bring its .idx "
                "file back"
            ) from None
        if not len(chunk):
            return
        yield np.stack([np.arange(begin, begin + len(chunk)), chunk], 1)
        begin += len(chunk)
        file.forget()


def _collect(tables: Iterator[np.ndarray], cached: Path | None) -> Index:
    """Collect rows of key and offset: in memory, or from `CACHED_FROM` on in the cache file.

    The file is written as the rows come, so that a process never holds them all.
    """
    rows: list[np.ndarray] = []
    for table in tables:
        rows.append(table)
        if cached is not None and sum(map(len, rows)) >= CACHED_FROM:
            return _write_cache(rows, tables, cached)
    return Index(np.concatenate(rows))


def _cache_file(file: RecordFile, idx_path: Path) -> Path:
    # The name changes with the state of either file.
    states = [_state(path) for path in (file.path, idx_path) if path.exists()]
    path_hash = hashlib.sha256(os.fsencode(file.path.resolve())).hexdigest()[:24]
    state_hash = hashlib.sha256(repr((str(idx_path), states)).encode()).hexdigest()[:24]
    return cache_folders.folder("recordio") / f"{path_hash}-{state_hash}.i8"


def _state(path: Path) -> tuple[int, ...]:
    """Return values that change when the file's content does.

    Copies that keep times (`cp -p`, `rsync -t`) may have the size and the time of the file that
    they replace, so the values include the inode and the time of the last change of status.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _write_cache(rows: list[np.ndarray], more: Iterator[np.ndarray], path: Path) -> Index:
    """Write the index atomically into the cache, and map it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            for table in itertools.chain(rows, more):
                file.write(table.astype("<i8").tobytes())
            file.flush()
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    for older in path.parent.glob(f"{path.name.split('-')[0]}-*.i8"):
        if older != path:
            older.unlink(missing_ok=True)
    return _mapped(path)
