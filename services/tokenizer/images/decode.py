"""Decodes images with Pillow, as RGB at the orientation in which people see them. For confined processes only."""

from __future__ import annotations

import contextlib
from io import BytesIO

import numpy as np
from PIL import (
    ExifTags,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from services.tokenizer.images.faults import is_own
from services.tokenizer.images.processor import RefusedImageError

# Imported here and not when they are first used, because a confined process can open no files.
_PLUGINS = (GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# Photos with further ones beside them, such as a preview or the second eye's: the first one counts.
_WITH_PREVIEWS = "MPO"
# The orientation of most pictures.
_UPRIGHT = 1
WHITE = (255, 255, 255, 255)


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the picture in a file, in mode RGB.

    Transparent pixels are composed with white. Of samples of 16 bits, the upper 8 are used.

    Raises:
        RefusedImageError: it is no picture of a supported format, damaged, animated or too large.
        MemoryError: it takes more memory than there is.
        Exception: an error of this process, which is not due to the file.
    """
    # The limit of `max_pixels` is checked here, by the sides that the file's header states.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check(image, max_pixels)
            image.load()
            return _rgb(_upright(image))
    except (RefusedImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise RefusedImageError(f"is damaged, or not an image; supported are {', '.join(FORMATS)}") from error
    except Exception as error:  # plugins raise errors of many kinds
        if is_own(error):
            raise
        raise RefusedImageError(f"is damaged: {error}") from error


def _check(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise RefusedImageError(f"has {width} x {height} pixels; at most {max_pixels} are allowed")
    if image.format != _WITH_PREVIEWS and getattr(image, "is_animated", False):
        raise RefusedImageError("is animated; send one of its frames as a picture of its own")


def _upright(image: Image.Image) -> Image.Image:
    """Return the picture turned as its EXIF data say; damaged data say nothing."""
    with contextlib.suppress(Exception):
        if image.getexif().get(ExifTags.Base.Orientation, _UPRIGHT) != _UPRIGHT:
            return ImageOps.exif_transpose(image)
    return image


def _rgb(image: Image.Image) -> Image.Image:
    """Return a picture in mode RGB, as processors of `transformers` convert it."""
    if image.mode.startswith("I"):
        # Of 16 bits. Pillow would cut off all values above 255.
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")
    # Pillow would copy one that is in this mode.
    return image if image.mode == "RGB" else image.convert("RGB")
