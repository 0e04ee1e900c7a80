"""Pictures for Pixtral's encoder in Mistral 3 and LLaVA: of their own size up to a bound, one embedding per square."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from common.errors import ConfigurationError
from services.tokenizer.images.processor import (
    CHANNELS,
    LOW_PIXELS,
    Detail,
    ImagePlan,
    Scaling,
    channels_first,
    settings_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from services.tokenizer.images.processor import Grid, Values

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PixtralProcessor:
    """See `ImageProcessor`. The grid of a picture is its squares down and across."""

    placeholder: str
    scaling: Scaling
    # The longest sides of a picture.
    height: int
    width: int
    # The side of a square of patches that becomes one embedding.
    square: int
    row_end: str
    image_end: str

    @classmethod
    def read(cls, stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> PixtralProcessor:
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
        return cls(
            placeholder=placeholder,
            scaling=Scaling.read(stated, _MEAN, _DEVIATION, Image.Resampling.BICUBIC),
            height=longest or size["height"],
            width=longest or size["width"],
            square=patch * merge,
            row_end=stated.get("image_break_token") or "[IMG_BREAK]",
            image_end=stated.get("image_end_token") or "[IMG_END]",
        )

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """See `ImageProcessor`."""
        return self.scaling.table()

    @cached_property
    def settings(self) -> bytes:
        """See `ImageProcessor`."""
        return settings_of("pixtral", **asdict(self))

    def cut(self, image: Image.Image, detail: Detail) -> tuple[Grid, Values]:
        """See `ImageProcessor.cut`."""
        low = math.isqrt(LOW_PIXELS) if detail is Detail.LOW else max(self.height, self.width)
        ratio = max(image.height / min(self.height, low), image.width / min(self.width, low))
        height, width = image.height, image.width
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((side - 1) // self.square + 1 for side in (height, width))
        values = channels_first(self.scaling.resize(image, rows * self.square, columns * self.square))
        return (rows, columns), np.ascontiguousarray(values.reshape(1, CHANNELS, -1))

    def plan(self, grid: Grid) -> ImagePlan:
        """See `ImageProcessor.plan`."""
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
