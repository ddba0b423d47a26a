"""`--data imagefolder:DIR`: DIR/train and DIR/val with one folder a class, as ImageNet is kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from accbench import data
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.process_group import Topology

# torchvision is imported where it is used: that takes seconds, and a launcher
# only checks that the folder is there.


Transform = Callable[[Image.Image], Image.Image]


class Source(data.Source):
    """A folder of image files."""

    @classmethod
    def check(cls, location: str | None) -> None:
        if location is None:
            raise RequestError("--data imagefolder needs its folder: --data imagefolder:DIR")
        train = Path(location) / "train"
        if not Path(location).is_dir():
            raise RequestError(f"--data: there is no folder {location}")
        if not train.is_dir():
            raise RequestError(f"--data: {location} has no folder train/")
        classes = [entry for entry in os.scandir(train) if entry.is_dir()]
        if not classes:
            raise RequestError(f"--data: {train} has no class folders, one a class")
        if not any(any(os.scandir(folder)) for folder in classes):
            raise RequestError(f"--data: the class folders of {train} are empty")

    def __init__(self, location: str, task: TaskConfig, options: Any, topology: Topology) -> None:
        self.task, self.topology = task, topology
        self.train_set = ReadableImages(Path(location) / "train", train_transform(task.image_size))
        self.num_classes = len(self.train_set.classes)
        val = Path(location) / "val"
        self.eval_set = (
            ReadableImages(val, eval_transform(task.image_size)) if val.is_dir() else None
        )
        if self.eval_set is not None and self.eval_set.classes != self.train_set.classes:
            raise RequestError(f"--data: train and val of {location} have different classes")

    def train_loader(self) -> data.Loader:
        return data.Loader(self.train_set, self.task, self.topology, train=True)

    def eval_loader(self) -> data.Loader | None:
        if self.eval_set is None:
            return None
        return data.Loader(self.eval_set, self.task, self.topology, train=False)


def train_transform(size: int) -> Transform:
    """The usual ResNet augmentation: a random part of 8 to 100 % of the image, flipped or not."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])


def eval_transform(size: int) -> Transform:
    """The shorter side to 256/224 of `size`, then the centre."""
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size)])


class ReadableImages(Dataset[data.Sample]):
    """torchvision's `ImageFolder` as (H, W, 3) uint8, past files that cannot be read.

    In place of a bad file stands the next good one, with a word on the bad.

    Raises:
        RequestError: no folder, no class in it, or a class without an image.
    """

    def __init__(self, folder: Path, transform: Transform) -> None:
        from torchvision.datasets import ImageFolder

        try:
            found = ImageFolder(str(folder))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(f"--data: {' '.join(str(error).split())}") from None
        self.classes, self.samples, self.transform = found.classes, found.samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> data.Sample:
        problem = None
        for offset in range(len(self)):
            path, label = self.samples[(index + offset) % len(self)]
            try:
                return self._read(path), label, problem
            # Pillow's decoders raise these for what a damaged file can hold.
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                problem = problem or f"cannot read image {path}: {' '.join(str(error).split())}"
        raise RuntimeError(f"not one of {len(self)} images could be read; first: {problem}")

    def _read(self, path: str) -> torch.Tensor:
        with Image.open(path) as image:
            pixels_HWC = np.array(self.transform(image.convert("RGB")))
        return torch.from_numpy(pixels_HWC)
