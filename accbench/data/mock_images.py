"""A mock ImageNet: real JPEG files whose class shows in colours, shapes and texture.

Sizes, quality and kinds are distributed as in ImageNet: most images are 500 x 375, a quarter is
upright, a few per cent are grey, and each has around 100 kB.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from rich.progress import track

from accbench.errors import RequestError
from accbench.system import cgroups

DEFAULT_FOLDER = "data/mock_imagenet"
_MANIFEST = "mock.json"
_VERSION = 1  # of the pictures; another number replaces existing ones


@dataclasses.dataclass(frozen=True)
class MockImagePlan:
    """The size of the mock data set."""

    num_classes: int = 10
    num_train: int = 64
    """Training images per class."""
    num_val: int = 16
    """Validation images per class."""
    seed: int = 0


def is_complete(folder: Path) -> bool:
    """Return whether `make` finished here."""
    return bool(_manifest(folder).get("complete"))


def _manifest(folder: Path) -> dict[str, object]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def make(folder: Path, plan: MockImagePlan) -> None:
    """Make the files of `plan` in `folder`; existing files of the same plan are kept.

    Files of another plan that this function made are removed first. A file gets its name when it is
    complete, so that a further call continues an interrupted one.

    Raises:
        RequestError: a number below 1; a folder that holds something else or
            cannot be written.
    """
    if min(plan.num_classes, plan.num_train, plan.num_val) < 1:
        raise RequestError("--classes, --train_images and --val_images must be at least 1")
    wanted = {"version": _VERSION, **dataclasses.asdict(plan)}
    manifest = _manifest(folder)
    if manifest == {**wanted, "complete": True}:
        return
    try:
        if folder.exists() and not manifest and any(folder.iterdir()):
            raise RequestError(
                f"{folder} holds something else than mock images; name another folder"
            )
        if manifest and {**manifest, "complete": None} != {**wanted, "complete": None}:
            for split in ("train", "val"):
                shutil.rmtree(folder / split, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, {**wanted, "complete": False})
        _make_missing(folder, plan)
        _write_manifest(folder, {**wanted, "complete": True})
    except OSError as error:
        raise RequestError(f"cannot write mock images to {folder}: {error}") from None


def _write_manifest(folder: Path, content: dict[str, object]) -> None:
    (folder / _MANIFEST).write_text(json.dumps(content) + "\n")


def _make_missing(folder: Path, plan: MockImagePlan) -> None:
    files = [(path, seed, label) for path, seed, label in _files(folder, plan) if not path.exists()]
    for parent in {path.parent for path, _, _ in files}:
        parent.mkdir(parents=True, exist_ok=True)
    # Threads suffice: drawing and encoding release Python's lock most of the time.
    with ThreadPoolExecutor(cgroups.num_cores()) as pool:
        done = pool.map(_write_picture, *zip(*files, strict=True)) if files else ()
        try:
            for _ in track(done, f"mock images in {folder}", total=len(files)):
                pass
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _files(folder: Path, plan: MockImagePlan) -> Iterator[tuple[Path, tuple[int, ...], int]]:
    for split_number, (split, count) in enumerate(
        (("train", plan.num_train), ("val", plan.num_val))
    ):
        for label in range(plan.num_classes):
            for index in range(count):
                path = folder / split / f"class{label:04d}" / f"{split}_{label:04d}_{index:05d}.jpg"
                yield path, (plan.seed, split_number, label, index), label


def _write_picture(path: Path, seed: tuple[int, ...], label: int) -> None:
    random = np.random.default_rng(seed)
    part = path.with_suffix(f".{os.getpid()}.part")  # another process may make it too
    try:
        picture(random, label).save(part, "JPEG", quality=int(random.integers(75, 97)))
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def picture(random: np.random.Generator, label: int) -> Image.Image:
    """Draw a picture of class `label`: its hues, shape and stripes; the rest is random."""
    width, height = _size(random)
    class_random = np.random.default_rng(label)  # a class looks the same in every data set
    background_RGB, shape_RGB = class_random.integers(40, 216, (2, 3))
    num_corners = int(class_random.integers(3, 9))
    angle, period_px = class_random.uniform(0, np.pi), class_random.uniform(8, 40)

    y_H1, x_1W = np.mgrid[0:height, 0:1][0], np.mgrid[0:1, 0:width][1]
    phase = 2 * np.pi * random.uniform()
    along_HW = x_1W * np.cos(angle) + y_H1 * np.sin(angle)
    stripes_HW = np.sin(2 * np.pi * along_HW / period_px + phase)
    light_HW = 30 * (x_1W / width - 0.5) * random.normal() + 30 * (y_H1 / height - 0.5)
    grain_HW = random.standard_normal((height, width), dtype=np.float32) * random.uniform(4, 14)
    shade_HW1 = (25 * stripes_HW + light_HW + grain_HW)[..., None]
    tint_RGB = background_RGB + random.normal(0, 12, 3)
    pixels_HWC = np.clip(tint_RGB + shade_HW1, 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels_HWC)
    draw = ImageDraw.Draw(image)
    for _ in range(int(random.integers(2, 6))):
        radius_px = random.uniform(0.08, 0.3) * min(width, height)
        centre = (random.uniform(0, width), random.uniform(0, height), radius_px)
        colour = np.clip(shape_RGB + random.normal(0, 15, 3), 0, 255).astype(int)
        draw.regular_polygon(centre, num_corners, random.uniform(0, 360), tuple(colour.tolist()))
    return image.convert("L") if random.uniform() < 0.03 else image


def _size(random: np.random.Generator) -> tuple[int, int]:
    """Draw a picture's (width, height) in pixels."""
    kind = random.uniform()
    if kind < 0.55:
        size = (500, 375)
    elif kind < 0.8:
        size = (375, 500)
    else:
        size = (int(random.integers(200, 801)), int(random.integers(200, 801)))
    return size
