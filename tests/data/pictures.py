"""Small encoded images for tests."""

import io

import numpy as np
from PIL import Image


def pixels(height: int, width: int, value: int | None = None) -> np.ndarray:
    """(H, W, 3) uint8: a gradient, or all of one value."""
    if value is not None:
        return np.full((height, width, 3), value, np.uint8)
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], 2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(height: int, width: int, value: int | None = None) -> bytes:
    return encoded(Image.fromarray(pixels(height, width, value)), "JPEG", quality=95)
