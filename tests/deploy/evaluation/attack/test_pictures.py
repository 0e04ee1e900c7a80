"""The files of pictures that oracles send."""

from __future__ import annotations

import zlib
from dataclasses import replace
from io import BytesIO

from PIL import Image

from deploy.evaluation.attack.pictures import SIDE, Picture

PICTURE = Picture(7, "holiday.png", "ab" * 16)


def test_a_file_has_the_pixels_and_what_is_said_of_them() -> None:
    image = Image.open(BytesIO(PICTURE.file()))
    assert (image.size, image.mode) == ((SIDE, SIDE), "RGB")
    assert image.tobytes() == PICTURE.pixels()
    assert image.info["Title"] == "holiday.png"
    assert image.getexif().get_ifd(0x8769)[0xA420] == "ab" * 16


def test_a_twin_differs_in_a_few_bytes_and_has_the_same_crc() -> None:
    first, twin = PICTURE.pixels(), replace(PICTURE, is_twin=True).pixels()
    assert zlib.crc32(first) == zlib.crc32(twin)
    assert 0 < sum(lhs != rhs for lhs, rhs in zip(first, twin, strict=True)) <= 5


def test_other_seeds_draw_other_pictures() -> None:
    assert PICTURE.pixels() == Picture(7).pixels() != Picture(8).pixels()
