"""Images in MXNet's RecordIO files as a PyTorch data set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from accbench import data
from accbench.data import decode
from accbench.data.recordio.file import ImageRecord, RecordFile, parse_image_record
from accbench.data.recordio.index import Index, index_of
from accbench.errors import RequestError, UnreadableSampleError

# Labels are float32, which represents integers only up to this.
_MAX_CLASSES = 1 << 24


class RecordIODataset(Dataset[tuple[Any, int]]):
    """Images and labels of a .rec file, reopened in every process that gets the data set.

    Args:
        path: the file, or a folder that holds train.rec.
        transform: called with each image as a PIL image in RGB, like the transforms of
            torchvision's `ImageFolder`. Without one a sample is a (3, H, W) uint8 tensor.

    Items are (image, label), with the first label of several. Reading a damaged item raises
    `UnreadableSampleError`, whose message names file and offset.

    Raises:
        RequestError: the file is missing or empty, or its index does not fit.
    """

    def __init__(
        self, path: str | Path, transform: Callable[[Image.Image], Any] | None = None
    ) -> None:
        path = Path(path)
        self.path = path / "train.rec" if path.is_dir() else path
        if not self.path.is_file():
            raise RequestError(f"there is no file {self.path}")
        self.transform: Callable[[Any], Any] | None = transform
        self._file = RecordFile(self.path)
        self._index = index_of(self._file)
        self._first, self._num_images = self._image_range(self._index)

    def _image_range(self, index: Index) -> tuple[int, int]:
        """Return the position in the index of the first image, and the number of images."""
        at_zero = index.position(0)
        if at_zero is None:
            return 0, len(index)
        try:
            header = self._parsed(index.offset(at_zero))
        except UnreadableSampleError:
            return 0, len(index)  # a damaged sample, reported when it is read
        if header.flag == 0 or len(header.payload):
            return 0, len(index)
        # insightface's convention: the images' keys are 1 to label - 1, and what
        # comes after them describes identities.
        end = int(header.label) if np.isfinite(header.label) else 0
        first = index.position(1)
        if first is None or end < 2 or index.position(end - 1) != first + end - 2:
            raise RequestError(
                f"{self.path}: record 0 counts the images' keys as 1 to {end - 1}, but the index "
                f"has {len(index)} keys and not all of these"
            )
        return first, end - 1

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels_HWC, label = self._pixels_and_label(index)
        if self.transform is None:
            return torch.from_numpy(pixels_HWC).permute(2, 0, 1), label
        return self.transform(Image.fromarray(pixels_HWC)), label

    def _pixels_and_label(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image's pixels, (H, W, 3) uint8 in RGB, and its first label."""
        record = self.record(index)
        try:
            return decode.decode_rgb(record.payload), self.label_of(index, record)
        except decode.ImageError as error:
            raise self._unreadable(index, error) from None

    def record(self, index: int) -> ImageRecord:
        """Return an image's header and encoded bytes, which are a view into the file.

        Raises:
            UnreadableSampleError: there is no complete record.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} images")
        return self._parsed(self._offset(index))

    def _offset(self, index: int) -> int:
        return self._index.offset(self._first + index % len(self))

    def _parsed(self, offset: int) -> ImageRecord:
        record = self._file.read(offset)
        try:
            return parse_image_record(record)
        except ValueError as error:
            raise UnreadableSampleError(f"{self.path}, offset {offset}: {error}") from None

    def label_of(self, index: int, record: ImageRecord) -> int:
        """Return a record's first label as a class number.

        Raises:
            UnreadableSampleError: the label is not a class number.
        """
        if not (0 <= record.label < _MAX_CLASSES and record.label == int(record.label)):
            raise self._unreadable(index, f"the label {record.label} is not a class number")
        return int(record.label)

    def _unreadable(self, index: int, problem: object) -> UnreadableSampleError:
        return UnreadableSampleError(f"{self.path}, offset {self._offset(index)}: {problem}")

    def view(self, index: int, viewer: decode.Viewer) -> tuple[torch.Tensor, int]:
        """Decode the wanted part of an image, (size, size, 3) uint8; return it and its label.

        Raises:
            UnreadableSampleError: the record or the image is damaged.
        """
        record = self.record(index)
        try:
            part_HWC = decode.decode_view(record.payload, viewer)
        except decode.ImageError as error:
            raise self._unreadable(index, error) from None
        return part_HWC, self.label_of(index, record)

    def get_img_info(self, index: int) -> dict[str, int]:
        """Return the image's height and width, from its header."""
        record = self.record(index)
        try:
            height, width = decode.size_of(record.payload)
        except decode.ImageError as error:
            raise self._unreadable(index, error) from None
        return {"height": height, "width": width}

    def count_classes(self) -> int:
        """Return the largest label plus one; reads every record's header."""
        largest = -1
        words = np.frombuffer(self._file.view()[: self._file.num_bytes // 4 * 4], "<u4")
        positions = slice(self._first, self._first + self._num_images)
        offsets = self._index.offsets[positions]
        for begin in range(0, len(offsets), 1024):
            # In words: 2 for the frame; flag, label, 4 for ids; then labels, if flag counts any.
            at = offsets[begin : begin + 1024] // 4
            at = at[at + 9 <= len(words)]
            several = words[at + 2] > 0
            labels = words[np.where(several, at + 8, at + 3)].view("<f4")
            labels = labels[(labels >= 0) & (labels < _MAX_CLASSES)]
            largest = max(largest, int(labels.max(initial=-1)))
            self._file.forget()
        return largest + 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Samples(data.ReadableSamples):
    """A `RecordIODataset` with the interface that accbench's loader needs."""

    def __init__(self, dataset: RecordIODataset, viewer: decode.Viewer, num_classes: int) -> None:
        self.dataset, self.viewer, self.num_classes = dataset, viewer, num_classes

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        image_HWC, label = self.dataset.view(index, self.viewer)
        if label >= self.num_classes:
            raise UnreadableSampleError(
                f"{self.dataset.path}, image {index}: the label {label} is not below the "
                f"{self.num_classes} classes"
            )
        return image_HWC, label
