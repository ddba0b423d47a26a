"""`--data imagefolder:DIR`: DIR/train and DIR/val with one folder per class, as for ImageNet."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

import torch

from accbench import data
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import decode, files, mixing
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError, UnreadableSampleError

# torchvision is imported where it is used: the import takes seconds, and a launcher only checks
# that the folder exists.


class Source(data.Source):
    """A folder of image files."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source imagefolder."""

        augment: Literal["crop", "flip", "part", "none"] = flag(
            "crop",
            "crop: a random part, mirrored at random. flip: the whole image, mirrored at random. "
            "part: a random 70 % or more of it, not mirrored, for digits and text. none: the whole "
            "image.",
        )

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

    def __init__(
        self, location: str, task: TaskConfig, options: Options, topology: Topology
    ) -> None:
        self.task, self.topology = task, topology
        options = options or self.Options()
        self.chance, self.keeps_whole_image = decode.Chance(task.seed), options.augment != "crop"
        viewer = decode.train_viewer(options.augment, task.image_size, self.chance)
        self.train_set = ReadableImages(Path(location) / "train", viewer)
        self.num_classes = len(self.train_set.classes)
        val = Path(location) / "val"
        view = decode.WholeView if self.keeps_whole_image else decode.CentreView
        self.eval_set = ReadableImages(val, view(task.image_size)) if val.is_dir() else None
        if self.eval_set is not None and self.eval_set.classes != self.train_set.classes:
            raise RequestError(f"--data: train and val of {location} have different classes")

    def train_loader(self) -> data.Loader:
        return data.Loader(
            self.train_set, self.task, self.topology, train=True, chance=self.chance,
            mixing=mixing.of_task(self.task, self.num_classes),
        )  # fmt: skip

    def eval_loader(self) -> data.Loader | None:
        if self.eval_set is None:
            return None
        return data.Loader(self.eval_set, self.task, self.topology, train=False)


class ReadableImages(data.ReadableSamples):
    """torchvision's `ImageFolder` as (H, W, 3) uint8, with unreadable files replaced.

    Raises:
        RequestError: there is no folder, no class in it, or a class has no image.
    """

    def __init__(self, folder: Path, viewer: decode.Viewer) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

        try:
            self.classes, class_to_label = find_classes(str(folder))
            self.samples = make_dataset(str(folder), class_to_label, IMG_EXTENSIONS)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(f"--data: {' '.join(str(error).split())}") from None
        self.viewer = viewer

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        try:
            return decode.decode_view(files.read(path), self.viewer), label
        except (OSError, decode.ImageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UnreadableSampleError(f"cannot read image {path}: {why}") from None
