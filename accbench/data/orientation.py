"""EXIF's orientation: how to turn a photograph so that it is upright.

The numbers are those of CIPA DC-008 (Exif 2.32), tag 274. Data sources for classification use
images as they are stored, as torchvision's `ImageFolder` does.
"""

import io

import torch
from PIL import ExifTags, Image

UPRIGHT = 1
_FIRST_TRANSPOSED = 5


def read_exif(encoded: bytes | memoryview) -> int:
    """Read the orientation, 1 to 8, that the caller has to apply; 1 if the file has none."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.format == "TIFF":
                image.load()  # Pillow then turns it, and drops the number
            value = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # a damaged file, which the decoder reports
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


def turned_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """Return the height and width of an image after it is turned."""
    return (width, height) if orientation >= _FIRST_TRANSPOSED else (height, width)


def turned(pixels_HWC: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turn pixels as the orientation says."""
    if orientation >= _FIRST_TRANSPOSED:
        pixels_HWC = pixels_HWC.transpose(0, 1)
    flipped = _FLIPPED[orientation]
    return pixels_HWC.flip(flipped).contiguous() if flipped else pixels_HWC.contiguous()


# Dimensions that are flipped, after the transposition.
_FLIPPED: dict[int, tuple[int, ...]] = {
    1: (), 2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,),
}  # fmt: skip
