"""Pictures for Pixtral's encoder in Mistral 3 and LLaVA: of their own size up to a bound, one embedding per square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from common.errors import ConfigurationError
from services.tokenizer.images.processor import (
    CHANNELS,
    CLIP_DEVIATION,
    CLIP_MEAN,
    LOW_PIXELS,
    Detail,
    ImagePlan,
    ImageProcessor,
    Scaling,
    channels_first,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.tokenizer.images.processor import Grid, Values


def read_pixtral(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """Read a processor's file, and check it against the encoder in config.json.

    Raises:
        ConfigurationError: they do not belong together, or an option is not supported.
    """
    if stated.get("do_center_crop"):
        raise ConfigurationError("image processor: do_center_crop is not supported")
    size = stated.get("size") or {"longest_edge": 1024}
    longest = size.get("longest_edge")
    merge = config.get("spatial_merge_size", 2) if config.get("model_type") == "mistral3" else 1
    wanted = (config.get("vision_config") or {}).get("patch_size", 16)
    patch = _side(stated.get("patch_size", wanted))
    if patch != wanted or stated.get("spatial_merge_size", merge) != merge:
        raise ConfigurationError(
            f"image processor: patches of {patch} in squares of {stated.get('spatial_merge_size', merge)}, but the "
            f"model has {wanted} and {merge}"
        )
    cutter = SquareCutter(
        placeholder=placeholder,
        height=longest or size["height"],
        width=longest or size["width"],
        square=patch * merge,
        row_end=stated.get("image_break_token") or "[IMG_BREAK]",
        image_end=stated.get("image_end_token") or "[IMG_END]",
    )
    return ImageProcessor(Scaling.read(stated, CLIP_MEAN, CLIP_DEVIATION, Image.Resampling.BICUBIC), cutter)


@dataclass(frozen=True, slots=True)
class SquareCutter:
    """See `PictureCutter`. The grid of a picture is its squares down and across."""

    placeholder: str
    # The longest sides of a picture.
    height: int
    width: int
    # The side of a square of patches that becomes one embedding.
    square: int
    row_end: str
    image_end: str

    def cut(self, image: Image.Image, scaling: Scaling, detail: Detail) -> tuple[Grid, Values]:
        """See `PictureCutter.cut`."""
        low = math.isqrt(LOW_PIXELS) if detail is Detail.LOW else max(self.height, self.width)
        ratio = max(image.height / min(self.height, low), image.width / min(self.width, low))
        height, width = image.height, image.width
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((side - 1) // self.square + 1 for side in (height, width))
        values = channels_first(scaling.resize(image, rows * self.square, columns * self.square))
        return (rows, columns), values.reshape(1, CHANNELS, -1)

    def plan(self, grid: Grid) -> ImagePlan:
        """See `PictureCutter.plan`."""
        rows, columns = grid
        if min(rows, columns) < 1:
            raise ValueError(f"a grid of {grid}")
        height, width, row = rows * self.square, columns * self.square, self.placeholder * columns
        return ImagePlan(
            values=(1, CHANNELS, height * width),
            pixels=(CHANNELS, height, width),
            frames=1,
            text=(row + self.row_end) * (rows - 1) + row + self.image_end,
            embeddings=rows * columns,
        )


def _side(stated: Any) -> int:  # free JSON
    """Return the side of patches, which files state as a number or as two equal ones."""
    sides = set(stated.values()) if isinstance(stated, dict) else {stated}
    if len(sides) != 1:
        raise ConfigurationError(f"image processor: patches of {stated} are not supported")
    return int(sides.pop())
