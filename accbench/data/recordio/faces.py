"""insightface's data set of faces, without mxnet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accbench.data.recordio.dataset import RecordIODataset
from accbench.data.recordio.file import RecordFile
from accbench.data.recordio.index import Index


class MXFaceDataset(RecordIODataset):
    """insightface's training set: faces mirrored at random, scaled to -1..1.

    Items are (the output of `transform`, label as a () int64 tensor). `transform` takes an image as
    (H, W, 3) uint8 in RGB and returns (3, H, W) float32; another may be set, such as insightface's
    own with `ToPILImage`, and None leaves images unchanged.

    Attributes:
        imgidx: keys of the images, (num_images,) int64; a subset makes a smaller data set.
        imgrec: the records by key, with `read_idx` and `keys` of mxnet's `MXIndexedRecordIO`.
        header0: the two labels of record 0: the last key of an image plus one, and the last key of
            all plus one. It exists only if record 0 is such a header.

    Args:
        root_dir: holds train.rec and train.idx.
        local_rank: accepted as the original's argument; not used.

    Raises:
        RequestError: the file is missing or empty, or its index does not fit.
    """

    def __init__(self, root_dir: str | Path, local_rank: int = 0) -> None:
        super().__init__(Path(root_dir) / "train.rec")
        self.root_dir, self.local_rank = root_dir, local_rank
        self.transform: Callable[[Any], Any] | None = mirrored_and_scaled
        self.imgidx = np.array(self._index.keys[self._first : self._first + self._num_images])
        if self._first:
            labels = self._parsed(self._index.offset(0)).labels
            self.header0 = tuple(int(label) for label in labels[:2])

    @property
    def imgrec(self) -> "Records":
        """The records by key."""
        return Records(self._file, self._index)

    def __len__(self) -> int:
        return len(self.imgidx)

    def _offset(self, index: int) -> int:
        return self.imgrec.offset(int(self.imgidx[index]))

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:  # type: ignore[override]
        pixels_HWC, label = self._pixels_and_label(index)
        sample = pixels_HWC if self.transform is None else self.transform(pixels_HWC)
        return sample, torch.tensor(label)


def mirrored_and_scaled(pixels_HWC: np.ndarray) -> torch.Tensor:
    """Convert (H, W, 3) uint8 to (3, H, W) float32 in -1..1, mirrored by torch's generator."""
    image_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)
    if torch.rand(()).item() < 0.5:
        image_CHW = image_CHW.flip(2)
    return image_CHW.contiguous().float().div_(127.5).sub_(1.0)


class Records:
    """The records of a file by key, with methods of mxnet's `MXIndexedRecordIO`."""

    def __init__(self, file: RecordFile, index: Index) -> None:
        self._file, self._index = file, index

    @property
    def keys(self) -> list[int]:
        """All keys, ascending."""
        return [int(key) for key in self._index.keys]

    def offset(self, key: int) -> int:
        """Return the offset in the file at which a record begins.

        Raises:
            KeyError: there is no record with this key.
        """
        position = self._index.position(key)
        if position is None:
            raise KeyError(f"{self._file.path} has no record of key {key}")
        return self._index.offset(position)

    def read_idx(self, key: int) -> bytes:
        """Return a record with its header, as mxnet's `recordio.unpack` takes it.

        Raises:
            KeyError: there is no record with this key.
            UnreadableSampleError: the record is damaged.
        """
        return bytes(self._file.read(self.offset(key)))
