"""Which files are read as pictures, and how: formats, modes, orientation; and what is refused by name."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

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


def frames(name: str) -> bytes:
    return file_of(PICTURE, name, save_all=True, append_images=[picture(40, 24, seed=6)])


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
