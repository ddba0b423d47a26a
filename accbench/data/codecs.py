"""Image formats: reading their headers, and decoding their pixels as RGB.

simplejpeg (libjpeg-turbo), the fastest of four decoders that were measured (docs/measured.md),
decodes JPEG. Pillow decodes what simplejpeg refuses and all other formats, so that an image looks
as torchvision's `ImageFolder` would show it. An image that both refuse, or of which a part is
missing, is an error.
"""

import io
import re
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

# An image of more pixels is refused before it is decoded: this is Pillow's limit for a
# decompression bomb.
MAX_PIXELS = 2 * 89_478_485


# libjpeg's messages for missing pixels: the file ends, or its end marker comes too early.
_MISSING = re.compile("[Pp]remature end|found marker 0xd9")


class ImageError(ValueError):
    """The bytes are not an image that can be read."""


class Header(NamedTuple):
    """An image's header."""

    height: int
    width: int
    colours: str | None
    """A JPEG file's colour space; None if only Pillow reads the file."""


def header_of(encoded: bytes | memoryview) -> Header:
    """Read an image's header.

    Raises:
        ImageError: the bytes are no image, or a decompression bomb.
    """
    header = _jpeg_header(encoded) if bytes(encoded[:3]) == b"\xff\xd8\xff" else None
    if header is None:
        width, height = _opened(encoded).size
        header = Header(height, width, None)
    _refuse_bomb(header.height, header.width)
    return header


def _jpeg_header(encoded: bytes | memoryview) -> Header | None:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg has no name for
        return None
    return Header(height, width, colours)


def pixels_of(encoded: bytes | memoryview, header: Header, reduce: int = 1) -> np.ndarray:
    """Decode an image to (H, W, 3) uint8.

    16-bit grey is scaled by 1/256, which keeps the format's white; Pillow's `convert`, and so
    torchvision, clip it. Formats that do not define white (integers of 32 bits or with a sign, and
    floating point) hold brightness from 0 to 255, as `convert` assumes. Integers above that are
    scaled as 16-bit grey, the next smaller range in use. Values that still make no sense are
    refused: integers above 65535, and floats above 255 or only up to 1.

    Args:
        encoded: the file's bytes.
        header: what `header_of` returned for them.
        reduce: 1, 2, 4 or 8: a JPEG file is decoded at 1/reduce of its size (rounded up) from the
            coefficients, which is faster; other formats ignore it.

    Raises:
        ImageError: the bytes are no image, truncated, damaged, or a decompression bomb.
    """
    if header.colours is None:
        return _decode_with_pillow(_opened(encoded))
    pixels_HWC = _decode_with_simplejpeg(encoded, header, reduce)
    if pixels_HWC is None:
        pixels_HWC = _decode_with_simplejpeg(_plain_jpeg(encoded), header, reduce)
    # Libraries convert CMYK to RGB differently. Decoding by simplejpeg first is still useful: where
    # a file is cut but has an end marker, Pillow would paint the missing part grey.
    if pixels_HWC is None or header.colours in ("CMYK", "YCCK"):
        return _decode_with_pillow(_opened(encoded))
    return pixels_HWC


def _decode_with_simplejpeg(
    encoded: bytes | memoryview, header: Header, reduce: int
) -> np.ndarray | None:
    """Decode by libjpeg; return None for files that only Pillow may be able to read."""
    try:
        return simplejpeg.decode_jpeg(
            encoded, "RGB", min_height=-(-header.height // reduce),
            min_width=-(-header.width // reduce), min_factor=reduce,
        )  # fmt: skip
    except ValueError as error:
        if _MISSING.search(str(error)):
            raise ImageError(_one_line(error)) from None
        return None


def _plain_jpeg(encoded: bytes | memoryview) -> bytes:
    """Return the file without what libjpeg only warns of before the first scan.

    These are bytes between segments, and revisions of JFIF above 1. libjpeg reports only its first
    warning, and a later one may be that pixels are missing.
    """
    content, plain, at = bytes(encoded), bytearray(b"\xff\xd8"), 2
    while True:
        at = content.find(b"\xff", at)
        if at < 0 or at + 4 > len(content):
            return bytes(plain)
        marker = content[at + 1]
        if marker in (0x00, 0xFF):  # no marker, or a marker that begins with further 0xff
            at += 1
            continue
        if marker == 0xDA:  # start of scan
            return bytes(plain) + content[at:]
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # without a length, and without a use here
            at += 2
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        segment = bytearray(content[at:end])
        if marker == 0xE0 and segment[4:9] == b"JFIF\0" and len(segment) > 9:
            segment[9] = 1
        plain += segment
        at = end


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise ImageError(f"{width} x {height} pixels, more than {MAX_PIXELS}: a decompression bomb")


# Exceptions that Pillow's decoders raise, or may raise, for damaged files.
_PILLOW_ERRORS: Any = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError,
    RuntimeError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


def _opened(encoded: bytes | memoryview) -> Image.Image:
    if not len(encoded):
        raise ImageError("empty")
    try:
        return Image.open(io.BytesIO(encoded))
    except Image.UnidentifiedImageError:
        raise ImageError("no image that Pillow knows") from None
    except _PILLOW_ERRORS as error:
        raise ImageError(_one_line(error)) from None


def _decode_with_pillow(image: Image.Image) -> np.ndarray:
    _refuse_bomb(image.height, image.width)
    is_deep_grey = image.mode.startswith("I;16") or image.mode in ("I", "F")
    try:
        image.load()
        if not is_deep_grey:
            return np.array(image.convert("RGB"))
    except _PILLOW_ERRORS as error:
        raise ImageError(_one_line(error)) from None
    return _deep_grey(image)


def _deep_grey(image: Image.Image) -> np.ndarray:
    """Convert grey of more than 8 bits; see `pixels_of` for its scale."""
    values_HW = np.asarray(image)
    largest = values_HW.max()
    # Pillow keeps PGM of 16 bits, and some releases PNG, in 32.
    is_16_bit = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")
    if not is_16_bit:
        if largest <= 255 and (image.mode == "I" or largest == 0 or largest > 1):
            return np.array(image.convert("RGB"))
        if image.mode == "F" or largest > 65535:
            raise ImageError(
                f"grey values up to {largest:g}, of which none is known to be white: save 8 bits"
            )
    high_HW = (values_HW.astype(np.int32).clip(0, 65535) >> 8).astype(np.uint8)
    return np.repeat(high_HW[..., None], 3, axis=2)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
