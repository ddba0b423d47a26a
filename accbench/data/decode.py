"""Decoding of encoded images to the pixels that a model sees, and no more than those."""

import dataclasses
import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import get_worker_info

from accbench.data import orientation
from accbench.data.codecs import Header, header_of, pixels_of
from accbench.data.codecs import ImageError as ImageError  # what these functions raise


@dataclasses.dataclass(frozen=True)
class View:
    """A part of an image, in its pixels, scaled to `size` x `size` and perhaps mirrored."""

    top: int
    left: int
    height: int
    width: int
    size: int
    mirrored: bool = False


# Function of an image's (height, width) that returns the wanted part
Viewer = Callable[[int, int], View]


class Chance:
    """Random numbers of augmentation, separate from those of training.

    After `restart` they follow from `seed` and its key. Before that they follow from torch's seed
    in a loader's worker process, so that no two processes draw the same, and elsewhere from `seed`.
    A copy in another process starts again.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random: random.Random | None = None

    def __call__(self) -> float:
        """Draw a uniform number in 0..1, 1 excluded."""
        if self._random is None:
            worker = get_worker_info()
            self._random = random.Random(self.seed if worker is None else worker.seed)
        return self._random.random()

    def restart(self, key: int) -> None:
        """Restart from `seed` and `key`, whatever was drawn before, in whatever process."""
        self._random = random.Random(f"{self.seed} {key}")

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Chance, (self.seed,)


@dataclasses.dataclass(frozen=True)
class RandomView:
    """A random part of 8 % or more of the image, mirrored at random: the usual training crop.

    As in Szegedy et al., Going Deeper with Convolutions, 2014, the area is uniform, and the ratio
    of width to height is log-uniform between 3/4 and 4/3.
    """

    size: int
    chance: Chance = dataclasses.field(default_factory=Chance)
    min_area: float = 0.08
    may_mirror: bool = True

    def __call__(self, height: int, width: int) -> View:
        chance = self.chance
        mirrored = chance() < 0.5 and self.may_mirror
        for _ in range(10):
            area = (self.min_area + (1 - self.min_area) * chance()) * height * width
            aspect = math.exp(math.log(4 / 3) * (2 * chance() - 1))
            part_width = round(math.sqrt(area * aspect))
            part_height = round(math.sqrt(area / aspect))
            if 0 < part_width <= width and 0 < part_height <= height:
                top = int(chance() * (height - part_height + 1))
                left = int(chance() * (width - part_width + 1))
                return View(top, left, part_height, part_width, self.size, mirrored)
        # A very long image: its centre, with the nearest aspect ratio allowed.
        part_width = min(width, max(1, round(height * 4 / 3)))
        part_height = min(height, max(1, round(width * 4 / 3)))
        top, left = (height - part_height) // 2, (width - part_width) // 2
        return View(top, left, part_height, part_width, self.size, mirrored)


@dataclasses.dataclass(frozen=True)
class CentreView:
    """The centre square: 224/256 of the shorter side."""

    size: int

    def __call__(self, height: int, width: int) -> View:
        side = max(1, round(min(height, width) * 224 / 256))
        return View((height - side) // 2, (width - side) // 2, side, side, self.size)


@dataclasses.dataclass(frozen=True)
class WholeView:
    """All of the image, mirrored at random if there is `chance`: for images cut to size."""

    size: int
    chance: Chance | None = None

    def __call__(self, height: int, width: int) -> View:
        mirrored = self.chance is not None and self.chance() < 0.5
        return View(0, 0, height, width, self.size, mirrored)


def train_viewer(augment: str, size: int, chance: Chance) -> Viewer:
    """Return the viewer of a source's option `augment`: crop, flip, part or none."""
    if augment == "crop":
        return RandomView(size, chance)
    if augment == "part":
        return RandomView(size, chance, min_area=0.7, may_mirror=False)
    return WholeView(size, chance if augment == "flip" else None)


def size_of(encoded: bytes | memoryview) -> tuple[int, int]:
    """Return an image's (height, width) in pixels, from its header alone.

    Raises:
        ImageError: the bytes are no image, or a decompression bomb.
    """
    header = header_of(encoded)
    return header.height, header.width


def decode_rgb(encoded: bytes | memoryview) -> np.ndarray:
    """Decode any image to (H, W, 3) uint8: grey, CMYK, palette, alpha and 16 bit too.

    Raises:
        ImageError: the bytes are no image, truncated, damaged, or a decompression bomb.
    """
    return pixels_of(encoded, header_of(encoded))


def decode_view(encoded: bytes | memoryview, viewer: Viewer) -> torch.Tensor:
    """Decode the part that a viewer chooses, as (size, size, 3) uint8.

    Raises:
        ImageError: the bytes are no image, truncated, damaged, or a decompression bomb.
    """
    header = header_of(encoded)
    view = viewer(header.height, header.width)
    if (view.height, view.width) == (view.size, view.size):
        pixels_HWC = torch.from_numpy(pixels_of(encoded, header))
        part_HWC = pixels_HWC[view.top : view.top + view.size, view.left : view.left + view.size]
    else:
        part_HWC = _decode_scaled(encoded, view, header)
    return part_HWC.flip(1) if view.mirrored else part_HWC


def decode_within(
    encoded: bytes | memoryview, height: int, width: int, mirrored: bool = False,
    turn: int = orientation.UPRIGHT,
) -> tuple[torch.Tensor, tuple[int, int]]:  # fmt: skip
    """Decode an image into (height, width, 3) uint8; return it with its height and width there.

    The image is as large as fits, at the top and left; the rest is black.

    Args:
        encoded: the file's bytes.
        height: height of the result in pixels.
        width: width of the result in pixels.
        mirrored: whether to mirror the image after turning it.
        turn: EXIF's orientation, by which the image is turned.

    Raises:
        ImageError: the bytes are no image, truncated, damaged, or a decompression bomb.
    """
    header = header_of(encoded)
    full_height, full_width = orientation.turned_size(header.height, header.width, turn)
    scale = min(height / full_height, width / full_width)
    inner_height = min(height, max(1, round(full_height * scale)))
    inner_width = min(width, max(1, round(full_width * scale)))
    part_HWC = decode_stretched(encoded, inner_height, inner_width, mirrored, turn)
    out_HWC = part_HWC.new_zeros(height, width, 3)
    out_HWC[:inner_height, :inner_width] = part_HWC
    return out_HWC, (inner_height, inner_width)


def decode_stretched(
    encoded: bytes | memoryview, height: int, width: int, mirrored: bool = False,
    turn: int = orientation.UPRIGHT,
) -> torch.Tensor:  # fmt: skip
    """Decode all of an image as (height, width, 3) uint8, whatever its aspect ratio.

    Args:
        encoded: the file's bytes.
        height: height of the result in pixels.
        width: width of the result in pixels.
        mirrored: whether to mirror the image after turning it.
        turn: EXIF's orientation, by which the image is turned.

    Raises:
        ImageError: the bytes are no image, truncated, damaged, or a decompression bomb.
    """
    header = header_of(encoded)
    view = View(0, 0, header.height, header.width, min(height, width))
    stored_size = orientation.turned_size(height, width, turn)  # a transposition is its own inverse
    out_HWC = orientation.turned(_decode_scaled(encoded, view, header, stored_size), turn)
    return out_HWC.flip(1) if mirrored else out_HWC


def _decode_scaled(
    encoded: bytes | memoryview, view: View, header: Header, size: tuple[int, int] | None = None
) -> torch.Tensor:
    """Decode a part of an image and scale it to `size` (height, width), or else to a square."""
    # Decode at full resolution only if the part needs it.
    spare = min(view.height, view.width) // view.size
    reduce = 1 << min(3, spare.bit_length() - 1) if spare else 1
    pixels_HWC = torch.from_numpy(pixels_of(encoded, header, reduce))
    down, right = pixels_HWC.shape[0] / header.height, pixels_HWC.shape[1] / header.width
    top, left = int(view.top * down), int(view.left * right)
    bottom = max(top + 1, round((view.top + view.height) * down))
    end = max(left + 1, round((view.left + view.width) * right))
    # torch's resize of NHWC bytes is four times as fast as Pillow's, and as good. The new dimension
    # is added first: otherwise its stride would hide the layout from torch, and the result would
    # have to be transposed.
    part_1CHW = pixels_HWC[top:bottom, left:end].unsqueeze(0).permute(0, 3, 1, 2)
    scaled = functional.interpolate(
        part_1CHW, size=size or (view.size, view.size), mode="bilinear", antialias=True
    )
    return scaled[0].permute(1, 2, 0)
