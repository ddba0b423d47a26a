"""`--data coco:DIR`: COCO's images and boxes, in batches of upright or of other images.

DIR/annotations/instances_train2017.json and DIR/train2017/, and the same of val2017. The format:
https://cocodataset.org/#format-data, "object detection".
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from accbench import data
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import decode, files, orientation
from accbench.data.batch_samplers import groups_of_aspect_ratio
from accbench.data.coco_annotations import Annotations
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError, UnreadableSampleError

_UPRIGHT = 1
# torchvision's detectors pad images to a multiple of this.
_MULTIPLE = 32
_BACKGROUND = 0


class Source(data.Source):
    """Images whose shorter side is `--image_size`, in two shapes, and padded boxes.

    A batch is (images (N, 3, H, W) uint8, {"boxes": (N, M, 4) float32, "labels": (N, M) int64}), as
    in `accbench.models.tasks.detection`. M is the same in all, so that a compiler sees two shapes,
    that of upright images and that of others. Classes are numbered from 1 in the order of COCO's
    category ids; 0 is the background.
    """

    gives: ClassVar = "images with boxes"

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source coco."""

        train: str = flag(
            "train2017",
            "Training set: DIR/annotations/instances_TRAIN.json and the images in DIR/TRAIN.",
        )
        val: str = flag(
            "val2017", "Validation set, named in the same way, if there is such a file."
        )
        shape: Literal["aspect", "square"] = flag(
            "aspect",
            "aspect: 4 to 3 or 3 to 4, the same in a whole batch, with a shorter side of "
            "--image_size. square: stretched to --image_size both ways, for SSD models.",
        )
        augment: Literal["flip", "none"] = flag(
            "flip", "flip: mirrored at random. none: unchanged."
        )
        exif: Literal["auto", "turn", "ignore"] = flag(
            "auto",
            "What to do with EXIF's orientation. turn: turn images by it, for boxes drawn on what "
            "a browser or detectron2 shows. ignore: leave them as stored, as torchvision does. "
            "auto: whichever matches the height and width in the annotations; as stored if both "
            "do.",
        )

    @classmethod
    def check(cls, location: str | None) -> None:
        if location is None:
            raise RequestError("--data coco needs its folder: --data coco:DIR")
        if not Path(location).is_dir():
            raise RequestError(f"--data: there is no folder {location}")
        if not (Path(location) / "annotations").is_dir():
            raise RequestError(f"--data: {location} has no folder annotations/, as COCO's has")

    def __init__(
        self, location: str, task: TaskConfig, options: Options | None, topology: Topology
    ) -> None:
        self.task, self.topology = task, topology
        self.options = options = options or self.Options()
        self.chance = decode.Chance(task.seed)
        self.train_set = self._images(Path(location), options.train, options.augment == "flip")
        self.num_classes = len(self.train_set.classes) + 1
        self.eval_set = None
        if _annotations(Path(location), options.val).exists():
            self.eval_set = self._images(Path(location), options.val, may_mirror=False)
            if self.eval_set.classes != self.train_set.classes:
                raise RequestError(
                    f"--data: {options.train} and {options.val} of {location} have different "
                    "categories"
                )

    def _images(self, folder: Path, split: str, may_mirror: bool) -> "CocoImages":
        return CocoImages(
            folder / split, _annotations(folder, split), self.task.image_size,
            square=self.options.shape == "square", chance=self.chance if may_mirror else None,
            exif=self.options.exif,
        )  # fmt: skip

    def train_loader(self) -> data.Loader:
        return self._loader(self.train_set, train=True)

    def eval_loader(self) -> data.Loader | None:
        return None if self.eval_set is None else self._loader(self.eval_set, train=False)

    def _loader(self, images: "CocoImages", train: bool) -> data.Loader:
        return data.Loader(
            images, self.task, self.topology, train, chance=self.chance,
            collate=partial(_BoxCollate, images.most_objects), group_ids=images.group_ids,
        )  # fmt: skip


def _annotations(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


class CocoImages(data.ReadableSamples):
    """Images with at least one box; crowds are skipped, as in torchvision's references.

    Args:
        folder: folder of the images.
        annotations: COCO's JSON file.
        image_size: shorter side of a batch in pixels.
        square: whether images are stretched to a square.
        chance: mirrors images; None for no mirroring.
        exif: the source's option `exif`.

    Raises:
        RequestError: there is no such file, or it is not of COCO's form.
    """

    def __init__(
        self, folder: Path, annotations: Path, image_size: int, square: bool = False,
        chance: decode.Chance | None = None, exif: str = "auto",
    ) -> None:  # fmt: skip
        self.folder, self.square, self.chance, self.exif = folder, square, chance, exif
        try:
            parsed = Annotations(json.loads(files.read(annotations)))
        except OSError as error:
            raise RequestError(
                f"--data: cannot read {annotations}: {error.strerror or error}"
            ) from None
        except (ValueError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise RequestError(
                f"--data: {annotations} is not a file of COCO's form: {why}"
            ) from None
        if not parsed.names:
            raise RequestError(f"--data: {annotations} has no image with a box")
        self.classes = parsed.classes
        self.names, self._sizes = parsed.names, parsed.sizes
        # Plain arrays, as millions of objects are sent to each loading process.
        self._ends = np.cumsum([len(boxes) for boxes in parsed.boxes])
        self._boxes = np.concatenate([np.array(boxes, np.float32) for boxes in parsed.boxes])
        self._labels = np.concatenate([np.array(labels, np.int64) for labels in parsed.labels])
        self.most_objects = int(np.diff(self._ends, prepend=0).max())
        longer = -(-image_size * 4 // 3 // _MULTIPLE) * _MULTIPLE
        self._shapes = [(image_size, image_size)] * 2 if square else [
            (image_size, longer), (longer, image_size)
        ]  # fmt: skip
        self.group_ids = [0] * len(self) if square else groups_of_aspect_ratio(self, True)
        self._groups = [
            [index for index, group in enumerate(self.group_ids) if group == group_id]
            for group_id in (1 - _UPRIGHT, _UPRIGHT)
        ]
        self._position_in_group = {
            index: position for group in self._groups for position, index in enumerate(group)
        }

    def __len__(self) -> int:
        return len(self.names)

    def get_img_info(self, index: int) -> dict[str, int]:
        """Return an image's height and width in pixels, for maskrcnn-benchmark's samplers."""
        height, width = self._sizes[index]
        return {"height": height, "width": width}

    def replacement(self, index: int, offset: int) -> int:
        """Return a sample of the same group, as a batch has one shape."""
        group = self._groups[self.group_ids[index]]
        return group[(self._position_in_group[index] + offset) % len(group)]

    def read(self, index: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Read (image (H, W, 3) uint8, (boxes (m, 4) float32 in its pixels, labels (m,) int64))."""
        path, shape = self.folder / self.names[index], self._shapes[self.group_ids[index]]
        mirrored = self.chance is not None and self.chance() < 0.5
        try:
            encoded = files.read(path)
            size = self._sizes[index]
            turn = self._orientation(encoded, size)
            if self.square:
                image_HWC, inner = decode.decode_stretched(encoded, *shape, mirrored, turn), shape
            else:
                image_HWC, inner = decode.decode_within(encoded, *shape, mirrored, turn)
        except (OSError, decode.ImageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UnreadableSampleError(f"cannot read image {path}: {why}") from None
        begin = 0 if index == 0 else self._ends[index - 1]
        boxes_M4 = torch.from_numpy(self._boxes[begin : self._ends[index]].copy())
        down, right = inner[0] / size[0], inner[1] / size[1]
        boxes_M4 *= torch.tensor([right, down, right, down])
        if mirrored:
            boxes_M4[:, [0, 2]] = inner[1] - boxes_M4[:, [2, 0]]
        labels_M = torch.from_numpy(self._labels[begin : self._ends[index]].copy())
        return image_HWC, (boxes_M4, labels_M)

    def _orientation(self, encoded: bytes, size: tuple[int, int]) -> int:
        """Return how to turn an image for its annotations, which are for an image of `size`.

        Raises:
            ImageError: the annotations are for another size, however the image is turned.
        """
        stored = decode.size_of(encoded)
        if self.exif == "ignore" or (self.exif == "auto" and stored == size):
            turn = orientation.UPRIGHT
        else:
            turn = orientation.read_exif(encoded)
        if orientation.turned_size(*stored, turn) == size:
            return turn
        turned = f" (turned by EXIF's orientation {turn})" if turn != orientation.UPRIGHT else ""
        raise decode.ImageError(
            f"it has {stored[1]} x {stored[0]} pixels{turned}, and its annotations are for "
            f"{size[1]} x {size[0]}"
        )


@dataclasses.dataclass(frozen=True)
class _BoxCollate:
    """Builds ((images, {"boxes", "labels"}), problems) from samples; see `Source`.

    Boxes are padded to `most_objects`.

    With `pad_to`, a short batch is padded with black images without an object.
    """

    most_objects: int
    pad_to: int = 0

    def __call__(self, samples: Sequence[data.Sample]) -> tuple[data.Batch, list[str]]:
        (images_NCHW, _), problems = data.Collate(self.pad_to)(
            [(image_HWC, _BACKGROUND, problem) for image_HWC, _, problem in samples]
        )
        num_images, most = len(images_NCHW), self.most_objects
        boxes_NM4 = torch.zeros(num_images, most, 4)
        labels_NM = torch.full((num_images, most), _BACKGROUND)
        for index, (_, (boxes_M4, labels_M), _) in enumerate(samples):
            boxes_NM4[index, : len(boxes_M4)] = boxes_M4
            labels_NM[index, : len(labels_M)] = labels_M
        return (images_NCHW, {"boxes": boxes_NM4, "labels": labels_NM}), problems
