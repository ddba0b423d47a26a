"""All kinds of images to (H, W, 3) uint8, and those that are none."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from torchvision.datasets.folder import default_loader

from accbench.data import decode
from accbench.data.decode import CentreView, Chance, ImageError, RandomView, View, WholeView
from tests.data.pictures import encoded, jpeg, pixels


def as_pillow(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.array(image.convert("RGB"))


RGB = Image.fromarray(pixels(40, 60))


@pytest.mark.parametrize(
    "content",
    [
        jpeg(40, 60),
        encoded(RGB, "JPEG", progressive=True),
        encoded(RGB, "JPEG", subsampling=0),
        encoded(RGB.convert("L"), "JPEG"),
        encoded(RGB.convert("CMYK"), "JPEG"),
        encoded(RGB, "PNG"),
        encoded(RGB.convert("L"), "PNG"),
        encoded(RGB.convert("P"), "PNG"),
        encoded(RGB.convert("RGBA"), "PNG"),
        encoded(RGB.convert("1"), "PNG"),
        encoded(RGB, "WEBP", lossless=True),
        encoded(RGB, "BMP"),
    ],
)
def test_decodes_as_pillow_does(content):
    assert np.abs(decode.decode_rgb(content).astype(int) - as_pillow(content)).max() <= 1
    assert decode.decode_rgb(memoryview(content)).shape == (40, 60, 3)
    assert decode.size_of(content) == (40, 60)


def test_16_bit_is_scaled_not_clipped():
    grey_HW = np.linspace(0, 65535, 24 * 24).astype(np.uint16).reshape(24, 24)
    decoded = decode.decode_rgb(encoded(Image.fromarray(grey_HW), "PNG"))
    assert decoded.shape == (24, 24, 3)
    assert np.array_equal(decoded[..., 0], grey_HW >> 8)


def with_junk(content: bytes) -> bytes:
    """Bytes between two segments, which a decoder has to skip."""
    at = content.index(b"\xff\xdb")
    return content[:at] + b"\0junk" + content[at:]


def of_later_jfif(content: bytes) -> bytes:
    return content.replace(b"JFIF\0\1", b"JFIF\0\7", 1)


def as_ycck(content: bytes) -> bytes:
    """CMYK as YCCK: the last byte of Adobe's segment says which."""
    at = content.index(b"Adobe") + 11
    return content[:at] + b"\2" + content[at + 1 :]


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6  # orientation: to be shown upright, turn it by 90 degrees
    return exif


GREY = np.arange(40 * 60).reshape(40, 60)
ODD = {
    "JPEG with junk": with_junk(jpeg(40, 60)),
    "JPEG with junk before its end": jpeg(40, 60)[:-2] + b"junk" + jpeg(40, 60)[-2:],
    "JPEG of an unknown JFIF": of_later_jfif(jpeg(40, 60)),
    "JPEG with both": with_junk(of_later_jfif(jpeg(40, 60))),
    "JPEG with bytes behind": jpeg(40, 60) + b"junk",
    "progressive JPEG with junk": with_junk(encoded(RGB, "JPEG", progressive=True)),
    "CMYK": encoded(RGB.convert("CMYK"), "JPEG"),
    "YCCK": as_ycck(encoded(RGB.convert("CMYK"), "JPEG")),
    "CMYK with junk": with_junk(encoded(RGB.convert("CMYK"), "JPEG")),
    "turned JPEG": encoded(RGB, "JPEG", exif=turned()),
    "turned PNG": encoded(RGB, "PNG", exif=turned()),
    "turned TIFF": encoded(RGB, "TIFF", tiffinfo={274: 6}),
    "MPO": encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)]),
    "transparent colour": encoded(RGB.convert("P"), "PNG", transparency=3),
    "transparent palette": encoded(RGB.convert("P"), "PNG", transparency=bytes(range(256))),
    "transparent GIF": encoded(RGB.convert("P"), "GIF", transparency=3),
    "GIF of two": encoded(RGB, "GIF", save_all=True, append_images=[Image.new("RGB", (60, 40))]),
    "WEBP": encoded(RGB, "WEBP"),
    "transparent WEBP": encoded(RGB.convert("RGBA"), "WEBP", lossless=True),
    "TIFF": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "TIFF with JPEG in it": encoded(RGB, "TIFF", compression="jpeg"),
    "TIFF of CMYK": encoded(RGB.convert("CMYK"), "TIFF"),
    "TIFF of int32": encoded(Image.fromarray((GREY % 256).astype(np.int32)), "TIFF"),
    "TIFF of int32, some below 0": encoded(
        Image.fromarray(GREY.astype(np.int32) % 256 - 9), "TIFF"
    ),
    "TIFF of float": encoded(Image.fromarray((GREY / 10).astype(np.float32)), "TIFF"),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_odd_but_whole_is_what_torchvisions_loader_gives(content, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(content)
    expected = np.array(default_loader(str(path)))
    assert np.array_equal(decode.decode_rgb(content), expected)
    assert decode.size_of(content) == expected.shape[:2]
    assert decode.decode_view(content, CentreView(16)).shape == (16, 16, 3)


@pytest.mark.parametrize(
    "content",
    [
        encoded(Image.fromarray((GREY * 27).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray((GREY * 27).astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray((GREY * 27).astype(np.int32)), "TIFF"),
        b"P5 60 40 65535\n" + (GREY * 27).astype(">u2").tobytes(),
    ],
)
def test_16_bit_is_scaled_whatever_holds_it(content):
    assert np.array_equal(decode.decode_rgb(content)[..., 1], GREY * 27 >> 8)


def test_dark_16_bit_stays_dark():
    for content in (
        encoded(Image.fromarray(GREY.astype(np.uint16) // 10), "PNG"),
        b"P5 60 40 65535\n" + (GREY // 10).astype(">u2").tobytes(),
    ):
        assert decode.decode_rgb(content).max() == 0


@pytest.mark.parametrize(
    "values_HW", [GREY.astype(np.int32) * 100, GREY / 2400, GREY / 2, GREY * np.nan]
)
def test_grey_whose_white_is_not_known_is_refused(values_HW):
    values_HW = values_HW.astype(np.int32 if values_HW.dtype == np.int32 else np.float32)
    with pytest.raises(ImageError, match="white"):
        decode.decode_rgb(encoded(Image.fromarray(values_HW), "TIFF"))


CUT_JPEG = encoded(RGB, "JPEG", restart_marker_blocks=2)
NO_MORE = b"\xff\xd9"  # JPEG's end marker: a file that is cut may end in order all the same


@pytest.mark.parametrize("content", [*ODD.values(), CUT_JPEG], ids=[*ODD, "JPEG that restarts"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_lacks_pixels_is_refused(content):
    is_jpeg = content[:2] == b"\xff\xd8"
    first = content.find(NO_MORE) + 2 if is_jpeg else len(content)  # the first picture of several
    for missing in (first // 8, first // 3):
        for end in (b"", NO_MORE) if is_jpeg else (b"",):
            with pytest.raises(ImageError):
                decode.decode_rgb(content[: first - missing] + end)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_jpeg_cut_between_restarts_is_refused():
    at = CUT_JPEG.index(b"\xff\xd2")
    with pytest.raises(ImageError):
        decode.decode_rgb(CUT_JPEG[:at] + NO_MORE)


def test_whatever_pillow_raises_for_a_damaged_file_is_an_error_of_one_line():
    content = encoded(RGB, "TIFF")
    offsets_as_integer, as_float = struct.pack("<HH", 273, 4), struct.pack("<HH", 273, 11)
    assert offsets_as_integer in content
    with pytest.raises(ImageError) as caught:
        decode.decode_rgb(content.replace(offsets_as_integer, as_float))
    assert "\n" not in str(caught.value)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def jpeg_of(width: int, height: int) -> bytes:
    content = bytearray(jpeg(8, 8))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


@pytest.mark.parametrize("content", [png_of(50_000, 50_000), jpeg_of(60_000, 60_000)])
@pytest.mark.parametrize("function", [decode.decode_rgb, decode.size_of])
def test_decompression_bomb_is_refused_before_it_is_decoded(content, function):
    with pytest.raises(ImageError, match="bomb|exceeds limit"):
        function(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xd8\xff",
        b"no image at all",
        b"GIF89a no more",
        jpeg(400, 400)[:3000],
        jpeg(40, 60)[:-40],
        encoded(RGB, "PNG")[:120],
        encoded(RGB.convert("CMYK"), "JPEG")[:700],
        encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
    ],
)
def test_what_is_no_whole_image_is_an_error_of_one_line(content):
    with pytest.raises(ImageError) as caught:
        decode.decode_rgb(content)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_part_of_the_size_wanted_is_cut_out_exactly():
    content = jpeg(40, 60)
    part = decode.decode_view(content, lambda height, width: View(3, 5, 16, 16, 16))
    assert np.array_equal(part.numpy(), decode.decode_rgb(content)[3:19, 5:21])
    mirrored = decode.decode_view(content, lambda height, width: View(3, 5, 16, 16, 16, True))
    assert np.array_equal(mirrored.numpy(), part.numpy()[:, ::-1])


@pytest.mark.parametrize("size", [20, 60, 130, 250])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_large_part_decoded_at_a_fraction_looks_as_pillow_scales_it(size, kind):
    """A JPEG's part that shrinks to half or less comes from fewer coefficients."""
    image = Image.fromarray(pixels(400, 520))
    content = encoded(image, kind, quality=95) if kind == "JPEG" else encoded(image, kind)
    part = decode.decode_view(content, lambda height, width: View(30, 60, 300, 400, size))
    expected = image.resize((size, size), Image.Resampling.BILINEAR, box=(60, 30, 460, 330))
    assert part.shape == (size, size, 3)
    smooth = np.s_[2:-2, 2:-2, :2]  # the third channel wraps around, where kernels differ
    assert np.abs(part.numpy().astype(int) - np.array(expected))[smooth].max() <= 10


def test_random_views_lie_inside_and_are_spread_as_asked():
    view = RandomView(224, Chance(1))
    found = [view(375, 500) for _ in range(2000)]
    for part in found:
        assert 0 <= part.top <= part.top + part.height <= 375
        assert 0 <= part.left <= part.left + part.width <= 500
        assert 0.7 < part.width / part.height < 1.4
    shares = [part.height * part.width / (375 * 500) for part in found]
    assert 0.075 < min(shares) < 0.1
    assert 0.40 < np.mean(shares) < 0.46  # torchvision's: 0.433
    assert 0.45 < np.mean([part.mirrored for part in found]) < 0.55


@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 3)])
def test_views_of_strange_shapes(shape):
    for viewer in (RandomView(8), CentreView(8), WholeView(8, Chance())):
        part = viewer(*shape)
        assert part.height >= 1
        assert part.width >= 1
        content = encoded(Image.fromarray(pixels(*shape)), "PNG")
        assert decode.decode_view(content, viewer).shape == (8, 8, 3)


def test_chance_repeats_by_its_seed():
    assert [Chance(3)() for _ in range(3)] == [Chance(3)()] * 3
    assert Chance(3)() != Chance(4)()
