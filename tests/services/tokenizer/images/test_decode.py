"""Which files are read as pictures, and how: formats, modes, orientation; and what is refused by name."""

from __future__ import annotations

import errno
import struct
import tracemalloc
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from services.tokenizer.images import decode as decoding
from services.tokenizer.images.decode import decode
from services.tokenizer.images.processor import RefusedImageError
from tests.services.tokenizer.images.pictures import file_of, picture

PICTURE = picture(40, 24, seed=5)
MAX_PIXELS = 10_000


def decoded(data: bytes) -> np.ndarray[Any, Any]:
    image = decode(data, MAX_PIXELS)
    assert image.mode == "RGB"
    return np.asarray(image)


def transparent() -> Image.Image:
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def palette() -> Image.Image:
    image = PICTURE.quantize(16)
    image.info["transparency"] = 3
    return image


MODES = {
    "rgb": (PICTURE, "PNG"),
    "grey": (PICTURE.convert("L"), "PNG"),
    "grey jpeg": (PICTURE.convert("L"), "JPEG"),
    "one bit": (PICTURE.convert("1"), "PNG"),
    "jpeg": (PICTURE, "JPEG"),
    "cmyk": (PICTURE.convert("CMYK"), "JPEG"),
    "webp": (PICTURE, "WEBP"),
    "gif": (PICTURE, "GIF"),
    "palette": (PICTURE.quantize(16), "PNG"),
    "transparent": (transparent(), "PNG"),
    "transparent webp": (transparent(), "WEBP"),
    "grey and transparent": (transparent().convert("LA"), "PNG"),
    "palette and transparent": (palette(), "PNG"),
    "gif and transparent": (palette(), "GIF"),
}


@pytest.mark.parametrize("name", MODES)
def test_pictures_are_converted_as_by_transformers(name: str) -> None:
    data = file_of(*MODES[name])
    with Image.open(BytesIO(data)) as image:
        assert np.array_equal(decoded(data), convert_to_rgb(image, return_numpy=True))


def test_transparent_pixels_are_white() -> None:
    assert (decoded(file_of(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))) == 255).all()


def test_the_upper_bits_of_16_are_used() -> None:
    values = (np.arange(24 * 40).reshape(24, 40) * 68).astype(np.uint16)
    found = decoded(file_of(Image.fromarray(values)))
    assert np.array_equal(found, np.repeat((values >> 8)[..., None], 3, axis=2))


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(1, lambda array: array), (3, lambda array: array[::-1, ::-1]), (6, lambda array: np.rot90(array, 3)),
     (8, lambda array: np.rot90(array))],
)  # fmt: skip
def test_pictures_are_turned_as_their_camera_says(name: str, orientation: int, turned: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if name == "WEBP" else {}
    plain, marked = decoded(file_of(PICTURE, name, **options)), decoded(file_of(PICTURE, name, exif=exif, **options))
    assert np.array_equal(marked, turned(plain))


def test_a_photo_with_a_preview_is_its_first_picture() -> None:
    found = decoded(file_of(PICTURE, "MPO", save_all=True, append_images=[picture(40, 24, seed=6)]))
    assert np.array_equal(found, decoded(file_of(PICTURE, "JPEG")))


def frames(name: str, more: int = 1) -> bytes:
    return file_of(PICTURE, name, save_all=True, append_images=[picture(40, 24, seed=6 + i) for i in range(more)])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "damaged, or not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (file_of(PICTURE, "TIFF"), "supported are JPEG, PNG, WEBP, GIF"),
        (file_of(PICTURE, "BMP"), "not an image"),
        (file_of(PICTURE)[:-200], "damaged"),
        (file_of(PICTURE, "JPEG")[:300], "damaged"),
        (file_of(PICTURE, "WEBP")[:200], "damaged"),
        (file_of(PICTURE, "GIF")[:200], "damaged"),
        (frames("GIF"), "animated"),
        (frames("PNG"), "animated"),
        (frames("WEBP"), "animated"),
        (file_of(Image.new("1", (20_000, 20_000))), "20000 x 20000 pixels; at most 10000 are allowed"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(RefusedImageError, match=words):
        decode(data, MAX_PIXELS)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(depth: int, color: int, row: bytes, *extra: bytes) -> bytes:
    """Return a PNG of 40 x 24 pixels whose rows are all the same."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 24, depth, color, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress((b"\0" + row) * 24))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *extra, data, chunk(b"IEND", b"")))


def gif_with_a_large_frame() -> bytes:
    data = bytearray(file_of(PICTURE.quantize(16), "GIF"))
    frame = data.index(b"\x2c\0\0\0\0")
    data[frame + 5 : frame + 9] = struct.pack("<HH", 60_000, 60_000)
    return bytes(data)


GREY = bytes(range(40))
# Unpacks to 64 MiB.
BOMB = zlib.compress(bytes(64 * 1024 * 1024), 9)
TEXT = chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1_000_000)))


@pytest.mark.parametrize(
    ("data", "pixel"),
    [
        (png(16, 2, b"\x80\x12\x40\x99\x20\x01" * 40), (128, 64, 32)),
        (png(16, 6, (b"\x80\x12" * 3 + b"\xff\xff") * 40), (128, 128, 128)),
        (png(16, 6, b"\x80\x12\x80\x12\x80\x12\0\0" * 40), (255, 255, 255)),
        (png(16, 4, b"\x80\x12\xff\xff" * 40), (128, 128, 128)),
        (png(1, 0, b"\xaa" * 5, chunk(b"tRNS", b"\0\1")), (255, 255, 255)),
        (png(8, 0, GREY, chunk(b"tRNS", b"\0\0")), (255, 255, 255)),
    ],
    ids=["rgb", "rgba", "transparent rgba", "grey with alpha", "one bit transparent", "grey transparent"],
)
def test_rare_kinds_of_png_have_the_colours_that_they_state(data: bytes, pixel: tuple[int, ...]) -> None:
    assert tuple(decoded(data)[0, 0].tolist()) == pixel


def test_a_huge_color_profile_changes_nothing() -> None:
    plain = decoded(file_of(PICTURE, "JPEG"))
    assert np.array_equal(decoded(file_of(PICTURE, "JPEG", icc_profile=bytes(10 * 1024 * 1024))), plain)


def test_values_of_ink_are_inverted_where_adobe_s_marker_says_so() -> None:
    data = file_of(Image.new("RGB", (40, 24), (200, 100, 50)).convert("CMYK"), "JPEG")
    assert b"Adobe" in data[:20]
    assert np.abs(decoded(data).astype(int) - (200, 100, 50)).max() < 8


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png(8, 0, GREY, chunk(b"iCCP", b"x\0\0" + BOMB)), "damaged: Decompressed data too large"),
        (png(8, 0, GREY, chunk(b"zTXt", b"x\0\0" + BOMB)), "damaged: Decompressed data too large"),
        (png(8, 0, GREY, *[TEXT] * 80), "damaged: Too much memory"),
        (png(8, 0, GREY)[:33] + chunk(b"IDAT", BOMB) + chunk(b"IEND", b""), None),
        (file_of(picture(90, 90), "JPEG", progressive=True)[:-1500], "damaged"),
        (frames("GIF", 100), "animated"),
        (gif_with_a_large_frame(), "60000 x 60000 pixels"),
    ],
    ids=["profile", "text", "many texts", "rows", "progressive", "frames", "frame"],
)  # fmt: skip
def test_files_that_are_made_to_exhaust_their_decoder_do_not(data: bytes, words: str | None) -> None:
    tracemalloc.start()
    try:
        if words is None:
            # What follows the rows that the header states is not unpacked.
            assert decoded(data).shape == (24, 40, 3)
        else:
            with pytest.raises(RefusedImageError, match=words):
                decode(data, MAX_PIXELS)
        assert tracemalloc.get_traced_memory()[1] < 100 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        (ImportError("no file may be opened"), True), (AttributeError("of a program"), True),
        (OSError(errno.EMFILE, "too many open files"), True), (OSError("broken data stream"), False),
        (ValueError("of a file"), False),
    ],
    ids=["import", "program", "limit", "data", "value"],
)  # fmt: skip
def test_errors_that_are_not_of_the_file_are_not_reported_as_damage(
    error: Exception, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(decoding, "_upright", fail)
    with pytest.raises(type(error) if is_own else RefusedImageError) as caught:
        decode(file_of(PICTURE), MAX_PIXELS)
    assert (caught.value if is_own else caught.value.__cause__) is error
