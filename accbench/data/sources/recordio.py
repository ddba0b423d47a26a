"""`--data recordio:DIR_OR_REC`: images in MXNet's RecordIO files, one file for all images.

A folder holds train.rec and perhaps val.rec, preferably each with its .idx file.
"""

import dataclasses
import os
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from accbench import data
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import decode, mixing
from accbench.data.recordio.dataset import RecordIODataset, Samples
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError


class Source(data.Source):
    """Images in RecordIO files."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source recordio."""

        num_classes: int | None = flag(
            None,
            "Number of classes. Unset: the largest label plus one, for which all headers are read "
            "once.",
            minimum=1,
        )
        augment: Literal["crop", "flip", "part", "none"] = flag(
            "crop",
            "crop: a random part, mirrored at random. flip: the whole image, mirrored at random, "
            "for aligned faces. part: a random 70 % or more of it, not mirrored, for digits. "
            "none: the whole image.",
        )

    @classmethod
    def check(cls, location: str | None) -> None:
        if location is None:
            raise RequestError("--data recordio needs its file: --data recordio:FILE.rec or :DIR")
        _opened(location).close()  # a large index is made here, once for all workers

    def __init__(
        self, location: str, task: TaskConfig, options: Options, topology: Topology
    ) -> None:
        self.task, self.topology = task, topology
        self.train_set = _opened(location)
        val = self.train_set.path.with_name("val.rec")
        self.eval_set = _opened(val) if Path(location).is_dir() and val.exists() else None
        if self.eval_set is not None:
            _refuse_different_classes(self.train_set.path, val)
        sets = [dataset for dataset in (self.train_set, self.eval_set) if dataset is not None]
        self.num_classes = options.num_classes or max(map(_num_classes, sets))
        size = task.image_size
        self._keeps_whole_image = options.augment != "crop"
        self.chance = decode.Chance(task.seed)
        self._train_viewer = decode.train_viewer(options.augment, size, self.chance)

    def train_loader(self) -> data.Loader:
        samples = Samples(self.train_set, self._train_viewer, self.num_classes)
        return data.Loader(
            samples, self.task, self.topology, train=True, chance=self.chance,
            mixing=mixing.of_task(self.task, self.num_classes),
        )  # fmt: skip

    def eval_loader(self) -> data.Loader | None:
        if self.eval_set is None:
            return None
        view = decode.WholeView if self._keeps_whole_image else decode.CentreView
        viewer = view(self.task.image_size)
        samples = Samples(self.eval_set, viewer, self.num_classes)
        return data.Loader(samples, self.task, self.topology, train=False)


def _opened(path: str | Path) -> RecordIODataset:
    try:
        return RecordIODataset(path)
    except RequestError as error:
        raise RequestError(f"--data: {error}") from None


def _refuse_different_classes(train: Path, val: Path) -> None:
    """Compare what `accbench data convert` wrote beside both files, if it did."""
    train, val = (rec.with_suffix(".classes.txt") for rec in (train, val))
    try:
        names = [_class_names(file) for file in (train, val)]
    except FileNotFoundError:  # files of other tools have none
        return
    except OSError as error:
        raise RequestError(f"--data: cannot read {error.filename}: {error.strerror}") from None
    for label, (name, other) in enumerate(zip_longest(*names)):
        if name != other:
            raise RequestError(
                f"--data: {train} and {val.name} have different classes: {label} is "
                f"{_quoted(name)} in the one and {_quoted(other)} in the other; convert both from "
                "folders of the same classes"
            )


def _class_names(file: Path) -> list[str]:
    return [os.fsdecode(line) for line in file.read_bytes().split(b"\n") if line]


def _quoted(name: str | None) -> str:
    return "missing" if name is None else repr(name)


def _num_classes(dataset: RecordIODataset) -> int:
    count = dataset.count_classes()
    if count > len(dataset):
        raise RequestError(
            f"{dataset.path} has a label {count - 1} but {len(dataset)} images; if that is right, "
            f"say --recordio.num_classes {count}"
        )
    return count
