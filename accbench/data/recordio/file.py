"""MXNet's RecordIO files: records framed by a magic number, with an image header inside.

dmlc-core's recordio.h and mxnet's recordio.py define the format: a part is two little-endian
uint32, the magic number and a word with a flag in its upper 3 bits and the length in its lower 29,
then that many bytes, padded to a multiple of 4. A record is one part (flag 0), or was split
wherever its bytes had the magic number at a multiple of 4 (flags 1, 2 ..., 3), which the reader
inserts again.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from accbench.errors import RequestError, UnreadableSampleError

MAGIC = struct.pack("<I", 0xCED7230A)
_FRAME = struct.Struct("<4sI")
_HEADER = struct.Struct("<IfQQ")
_COMPLETE, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3
_LENGTH_MASK = (1 << 29) - 1
# mxnet refuses to write longer records, so that no record read can be longer.
MAX_RECORD_BYTES = _LENGTH_MASK


class DamagedRecordError(ValueError):
    """The bytes at an offset are not a record."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"offset {offset}: {reason}")


class ImageRecord(NamedTuple):
    """An image record: mxnet's header and what follows it."""

    label: float
    """The first label if there are several."""
    labels: np.ndarray
    """(num_labels,) float32."""
    flag: int
    id: int
    payload: bytes | memoryview


def record_at(data: memoryview, offset: int) -> tuple[bytes | memoryview, int]:
    """Return the record at `offset`, and the offset after it.

    Raises:
        DamagedRecordError: there is no complete record.
    """
    first, flag, position = _part(data, offset)
    if flag == _COMPLETE:
        return first, position
    if flag != _FIRST:
        raise DamagedRecordError(offset, f"a record cannot begin with a part of flag {flag}")
    parts, size = [first], len(first)
    while flag != _LAST:
        part, flag, following = _part(data, position)
        if flag not in (_MIDDLE, _LAST):
            raise DamagedRecordError(position, f"the record before it lacks its end (flag {flag})")
        parts.append(part)
        size += len(part) + len(MAGIC)
        if size > MAX_RECORD_BYTES:
            raise DamagedRecordError(offset, f"a record of more than {MAX_RECORD_BYTES} bytes")
        position = following
    return MAGIC.join(parts), position


def _part(data: memoryview, offset: int) -> tuple[memoryview, int, int]:
    """Return one part's bytes and flag, and the offset after it."""
    if offset < 0 or offset + _FRAME.size > len(data):
        raise DamagedRecordError(offset, f"the file ends at {len(data)}")
    magic, word = _FRAME.unpack_from(data, offset)
    if magic != MAGIC:
        raise DamagedRecordError(offset, f"{magic.hex()} instead of the magic number {MAGIC.hex()}")
    begin = offset + _FRAME.size
    end = begin + (word & _LENGTH_MASK)
    following = (end + 3) & ~3
    if following > len(data):
        raise DamagedRecordError(
            offset, f"a part of {end - begin} bytes, but the file ends at {len(data)}"
        )
    return data[begin:end], word >> 29, following


def offsets(data: memoryview) -> Iterator[int]:
    """Yield the offsets of all records, going from each to the next.

    Raises:
        DamagedRecordError: the bytes at an offset are not a record.
    """
    position = 0
    while position < len(data):
        yield position
        flag = _FIRST
        first = True
        while first or flag in (_FIRST, _MIDDLE):
            start = position
            _, flag, position = _part(data, position)
            if first != (flag in (_COMPLETE, _FIRST)):
                raise DamagedRecordError(start, f"a part of flag {flag} where none can be")
            first = False


def parse_image_record(record: bytes | memoryview) -> ImageRecord:
    """Parse an image record, as mxnet's `unpack` does.

    A flag above 0 counts labels that follow the header.

    Raises:
        ValueError: the record is too short for its header.
    """
    if len(record) < _HEADER.size:
        raise ValueError(f"{len(record)} bytes, too short for an image header")
    flag, label, id_, _ = _HEADER.unpack_from(record)
    begin = _HEADER.size + 4 * flag
    if begin > len(record):
        raise ValueError(f"the header counts {flag} labels, more than {len(record)} bytes hold")
    labels = np.frombuffer(record, "<f4", flag or 1, _HEADER.size if flag else 4)
    return ImageRecord(float(labels[0]), labels.copy(), flag, id_, record[begin:])


def image_record(labels: list[float], id_: int, payload: bytes) -> bytes:
    """Build an image record, as mxnet's `pack` does.

    One label is stored in the header, several after it.
    """
    if len(labels) == 1:
        return _HEADER.pack(0, labels[0], id_, 0) + payload
    label_bytes = np.asarray(labels, "<f4").tobytes()
    return _HEADER.pack(len(labels), 0.0, id_, 0) + label_bytes + payload


def write_record(file: BinaryIO, record: bytes) -> None:
    """Append one record, in parts if it contains the magic number.

    Raises:
        ValueError: it is longer than the format allows.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(record)} bytes; a record holds at most {MAX_RECORD_BYTES}")
    cuts = []
    position = record.find(MAGIC)
    while position >= 0:
        if position % 4 == 0:
            cuts.append(position)
        position = record.find(MAGIC, position + (4 if position % 4 == 0 else 1))
    begins = [0, *(cut + len(MAGIC) for cut in cuts)]
    ends = [*cuts, len(record)]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        flag = _COMPLETE if not cuts else _FIRST if number == 0 else _MIDDLE
        if cuts and number == len(cuts):
            flag = _LAST
        file.write(_FRAME.pack(MAGIC, flag << 29 | (end - begin)))
        file.write(record[begin:end])
        file.write(bytes(-(end - begin) % 4))


class RecordFile:
    """A memory-mapped .rec file, shared by processes, and reopened where it is unpickled.

    Raises:
        RequestError: it cannot be opened or is empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        try:
            with self.path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                if self.num_bytes == 0:
                    raise RequestError(f"{path} is empty: no record in it")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise RequestError(f"cannot open {path}: {error.strerror}") from None
        self._view = memoryview(self._map)

    def view(self) -> memoryview:
        """Return all of the file.

        Raises:
            UnreadableSampleError: the file has shrunk since it was opened; reading the missing part
                would kill the process.
        """
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        if self._map.size() < self.num_bytes:
            raise UnreadableSampleError(
                f"{self.path} was {self.num_bytes} bytes and is {self._map.size()} now"
            )
        return self._view

    def read(self, offset: int) -> bytes | memoryview:
        """Return the record at `offset`; a view into the file if it is in one part.

        Raises:
            UnreadableSampleError: the record is damaged; the message names file and offset.
        """
        view = self.view()
        try:
            record, following = record_at(view, offset)
        except DamagedRecordError as error:
            raise UnreadableSampleError(f"{self.path}, {error}") from None
        if len(record) > mmap.PAGESIZE:
            # One read from the disk for all of it, instead of one for every few pages.
            self._advise(mmap.MADV_WILLNEED, offset, following)
        return record

    def forget(self) -> None:
        """Release the memory of what was read; the kernel's cache keeps it."""
        self._advise(mmap.MADV_DONTNEED, 0, self.num_bytes)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        assert self._map is not None
        begin -= begin % mmap.PAGESIZE
        self._map.madvise(advice, begin, end - begin)

    def close(self) -> None:
        """Close the file; existing views keep it mapped until they are deleted."""
        if self._map is None:
            return
        mapped, self._map = self._map, None
        try:
            self._view.release()
            mapped.close()
        except BufferError:
            return  # a view still exists

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFile, (self.path,)
