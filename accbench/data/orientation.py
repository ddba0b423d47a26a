"""EXIF's orientation: how a photograph is to be turned for what its camera saw upright.

The numbers: CIPA DC-008 (Exif 2.32), tag 274. Data sources that classify show pictures as they are
stored, as torchvision's `ImageFolder` does.
"""

import io

import torch
from PIL import ExifTags, Image

UPRIGHT = 1
_FIRST_TRANSPOSED = 5


def of(encoded: bytes | memoryview) -> int:
    """Return the orientation, 1 to 8, that is left to the caller; 1 where the file tells none."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.format == "TIFF":
                image.load()  # by which Pillow turns it, and forgets the number
            found = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # of a file that is damaged, which its decoder is to tell of
        return UPRIGHT
    return found if found in range(1, 9) else UPRIGHT


def turned_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """Return the height and width of an image that is turned so."""
    return (width, height) if orientation >= _FIRST_TRANSPOSED else (height, width)


def turned(pixels_HWC: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return the pixels as the orientation wants them shown."""
    if orientation >= _FIRST_TRANSPOSED:
        pixels_HWC = pixels_HWC.transpose(0, 1)
    flipped = _FLIPPED[orientation]
    return pixels_HWC.flip(flipped).contiguous() if flipped else pixels_HWC.contiguous()


# Dimensions that are flipped, after the transposition.
_FLIPPED: dict[int, tuple[int, ...]] = {
    1: (), 2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,),
}  # fmt: skip
