"""Where the records of a .rec file are: from its .idx file, or by scanning.

A large index is kept as a binary file in the user's cache folder, and memory-mapped
from there: tens of millions of records cost a process next to nothing, and all
processes of a machine share them.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from accbench.data import recordio_file
from accbench.data.recordio_file import DamagedRecordError, RecordFile
from accbench.errors import RequestError

_CHUNK_BYTES = 1 << 22
# A shorter index is read anew each time, in a few hundredths of a second.
CACHED_FROM = 200_000


class Index:
    """Keys and offsets of records, by key. Pickled by its file's name where it has one."""

    def __init__(self, table: np.ndarray, path: Path | None = None) -> None:
        self._table, self._path = table, path

    def __len__(self) -> int:
        return self._table.shape[1]

    def key(self, position: int) -> int:
        """The key of the `position`th record."""
        return int(self._table[0, position])

    def position(self, key: int) -> int | None:
        """Where in the index a key is; None if it is not there."""
        found = int(np.searchsorted(self._table[0], key))
        return found if found < len(self) and self._table[0, found] == key else None

    def offset(self, position: int) -> int:
        """Where in the file the `position`th record begins."""
        return int(self._table[1, position])

    @property
    def offsets(self) -> np.ndarray:
        """(num_records,) int64."""
        return self._table[1]

    def __reduce__(self) -> tuple[object, ...]:
        return (_mapped, (self._path,)) if self._path else (Index, (self._table,))


def _mapped(path: Path) -> Index:
    return Index(np.load(path, mmap_mode="r", allow_pickle=False), path)


def index_of(file: RecordFile, idx_path: Path | None = None) -> Index:
    """The index of a .rec file.

    Args:
        idx_path: `FILE.idx` beside the file, if None. Where there is none, the
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
        except (OSError, ValueError):  # not ours, or cut short: made anew below
            cached.unlink(missing_ok=True)
    if idx_path.exists():
        table = _sorted(np.concatenate(list(_read(idx_path))), idx_path)
        _check_fit(table, file, idx_path)
    else:
        table = _scan(file)
    if table.shape[1] < CACHED_FROM:
        return Index(table)
    return _keep(table, cached)


def _read(path: Path) -> Iterator[np.ndarray]:
    """(num_lines, 2) int64 by chunks of the text `key TAB offset NEWLINE`."""
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
    # fromstring reads 30 million numbers a second, but takes any white space for one.
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


def _sorted(lines: np.ndarray, path: Path) -> np.ndarray:
    """(2, num_records): keys, offsets, by key."""
    table = np.ascontiguousarray(lines.T)
    steps = np.diff(table[0])
    if (steps < 0).any():
        table = table[:, np.argsort(table[0], kind="stable")]
        steps = np.diff(table[0])
    if (steps == 0).any():
        twice = int(table[0, int(np.argmax(steps == 0))])
        raise RequestError(f"{path} has the key {twice} twice")
    return table


def _check_fit(table: np.ndarray, file: RecordFile, idx_path: Path) -> None:
    first, last = int(table[1].min()), int(table[1].max())
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
            return  # one sample; named when it is read
        if end != file.num_bytes:
            problem = f"its last record ends at {end} and the file at {file.num_bytes}"
    if problem is not None:
        raise RequestError(
            f"{idx_path} does not fit {file.path}: {problem}; delete the .idx file, and the "
            "index is made from the .rec file"
        )


def _scan(file: RecordFile) -> np.ndarray:
    try:
        found = np.fromiter(recordio_file.offsets(file.view()), np.int64)
    except DamagedRecordError as error:
        raise RequestError(
            f"{file.path} has no .idx file and cannot be indexed: {error}; bring its .idx file back"
        ) from None
    return np.stack([np.arange(len(found)), found])


def _cache_file(file: RecordFile, idx_path: Path) -> Path:
    # The XDG base directory specification's place; another state of either file
    # is another name.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    states = [(s.st_size, s.st_mtime_ns) for s in (file.path.stat(),)]
    if idx_path.exists():
        states += [(s.st_size, s.st_mtime_ns) for s in (idx_path.stat(),)]
    of_path = hashlib.sha256(os.fsencode(file.path.resolve())).hexdigest()[:24]
    of_state = hashlib.sha256(repr((str(idx_path), states)).encode()).hexdigest()[:24]
    return base / "accbench" / "recordio" / f"{of_path}-{of_state}.npy"


def _keep(table: np.ndarray, path: Path) -> Index:
    """Write the index under its name when it is whole; in memory where that cannot be."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, suffix=".part", delete=False
        ) as temporary:
            part = Path(temporary.name)
            np.save(temporary, table, allow_pickle=False)
        part.rename(path)
        for older in path.parent.glob(f"{path.name.split('-')[0]}-*.npy"):
            if older != path:
                older.unlink(missing_ok=True)
        return _mapped(path)
    except OSError:  # read-only or full
        if part is not None:
            part.unlink(missing_ok=True)
        return Index(table)
