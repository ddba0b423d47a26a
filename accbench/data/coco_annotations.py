"""COCO's annotation files: images, their boxes and the boxes' classes, checked one by one.

The format: https://cocodataset.org/#format-data, "object detection".
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels."""


class Annotations:
    """The training data in a COCO file: images in the order of their ids.

    It skips crowds, boxes less than a pixel wide or high, of which COCO has a few, and images that
    then have no box.

    Args:
        content: the file's JSON.

    Raises:
        ValueError: the content has another form; the message names the annotation, category or
            image.
    """

    def __init__(self, content: Any) -> None:
        parts = {name: _entries(content, name) for name in ("categories", "images", "annotations")}
        categories = _by_id(parts["categories"], "category")
        ids = sorted(categories)
        self.classes = [str(_value(categories[key], "name", f"category {key}", str)) for key in ids]
        self._label_of = {key: label for label, key in enumerate(ids, start=1)}
        self._images = _by_id(parts["images"], "image")
        by_image: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
        for number, annotation in enumerate(parts["annotations"], start=1):
            if not annotation.get("iscrowd"):
                name = _name(annotation, number)
                key = self._image_of(annotation, name)
                by_image.setdefault(key, []).append((name, annotation))
        self.names: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        """Height and width of each image, in pixels."""
        self.boxes: list[list[Box]] = []
        self.labels: list[list[int]] = []
        for key in sorted(by_image):
            self._add(key, by_image[key])

    def _image_of(self, annotation: Mapping[str, Any], name: str) -> Any:
        key = _value(annotation, "image_id", name)
        if key not in self._images:
            raise ValueError(f"{name} is of image {key!r}, which is not among its images")
        return key

    def _add(self, key: Any, annotations: list[tuple[str, Mapping[str, Any]]]) -> None:
        image = self._images[key]
        height, width = (
            int(_value(image, side, f"image {key}", int, float)) for side in ("height", "width")
        )
        if min(height, width) < 1:
            raise ValueError(f"image {key} has {width} x {height} pixels")
        labelled_boxes = [
            (box, self._label(annotation, name))
            for name, annotation in annotations
            if (box := _box(annotation, name, height, width)) is not None
        ]
        if labelled_boxes:
            self.names.append(_inside(_value(image, "file_name", f"image {key}", str)))
            self.sizes.append((height, width))
            self.boxes.append([box for box, _ in labelled_boxes])
            self.labels.append([label for _, label in labelled_boxes])

    def _label(self, annotation: Mapping[str, Any], name: str) -> int:
        key = _value(annotation, "category_id", name)
        if key not in self._label_of:
            known = ", ".join(map(str, self._label_of)) or "none"
            raise ValueError(f"{name} is of category {key!r}, and its categories are {known}")
        return self._label_of[key]


def _entries(content: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(content, Mapping) or name not in content:
        raise ValueError(f"no {name!r}")
    entries = content[name]
    if not isinstance(entries, list):
        raise ValueError(f"{name!r} is a {type(entries).__name__}, not a list")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"number {number} of {name!r} is a {type(entry).__name__}")
    return entries


def _by_id(entries: list[Mapping[str, Any]], kind: str) -> dict[Any, Mapping[str, Any]]:
    by_id: dict[Any, Mapping[str, Any]] = {}
    for number, entry in enumerate(entries, start=1):
        key = _value(entry, "id", f"{kind} number {number} of the file")
        if key in by_id:
            raise ValueError(f"two of its {kind.replace('y', 'ie')}s have the id {key!r}")
        by_id[key] = entry
    if len({isinstance(key, str) for key in by_id}) > 1:
        raise ValueError(f"the ids of its {kind.replace('y', 'ie')}s are numbers and strings")
    return by_id


def _name(annotation: Mapping[str, Any], number: int) -> str:
    if "id" in annotation:
        return f"annotation {annotation['id']}"
    return f"annotation number {number} of the file, which has no id,"


def _value(entry: Mapping[str, Any], key: str, name: str, *kinds: type) -> Any:
    """Return a value of an entry, of one of the kinds; a number or a string if none is named."""
    if key not in entry:
        raise ValueError(f"{name} has no {key!r}")
    value = entry[key]
    if not isinstance(value, kinds or (int, float, str)):
        raise ValueError(f"{name} has {value!r} for {key!r}")
    return value


def _box(annotation: Mapping[str, Any], name: str, height: int, width: int) -> Box | None:
    """Return an annotation's box within its image; None if the box has no interior.

    A fraction of a pixel would vanish when the image is made smaller.
    """
    bbox = _value(annotation, "bbox", name, list)
    numbers = [x for x in bbox if isinstance(x, (int, float)) and math.isfinite(x)]
    if len(bbox) != 4 or len(numbers) != 4 or min(numbers[2:]) < 0:
        raise ValueError(f"{name} has the bbox {bbox}, not [left, top, width, height]")
    left, top, wide, high = map(float, numbers)
    if min(wide, high) < 1:
        return None
    if left >= width or top >= height or left + wide <= 0 or top + high <= 0:
        raise ValueError(f"{name} has the bbox {bbox} outside of its {width} x {height} pixels")
    box = max(0.0, left), max(0.0, top), min(width, left + wide), min(height, top + high)
    return box if box[2] - box[0] >= 1 and box[3] - box[1] >= 1 else None


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"image {name!r} is not inside the folder of images")
    return name
