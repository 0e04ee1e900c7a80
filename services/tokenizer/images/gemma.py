"""Pictures for Gemma 3: resized to a square; with pan and scan, crops of long pictures follow."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from common.errors import ConfigurationError
from services.tokenizer.images.processor import (
    CHANNELS,
    Detail,
    ImagePlan,
    ImageProcessor,
    Scaling,
    channels_first,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.tokenizer.images.processor import Grid, Values

_HALF = (0.5, 0.5, 0.5)
BEGIN = "<start_of_image>"
END = "<end_of_image>"
_BREAK = "\n\n"
_ORIGINAL = "Here is the original image "
_CROPS = " and here are some crops to help you see better "


def read_gemma(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """Read a processor's file, and check it against the encoder in config.json.

    Raises:
        ConfigurationError: they do not belong together, or an option is not supported.
    """
    side = (config.get("vision_config") or {}).get("image_size", 224)
    size = stated.get("size") or {"height": 224, "width": 224}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ConfigurationError(f"image processor: a size of {size}, but the model's pictures have {side} x {side}")
    per_tile = config.get("mm_tokens_per_image", 256)
    if (stated.get("image_seq_length") or per_tile) != per_tile:
        raise ConfigurationError(
            f"image processor: {stated['image_seq_length']} embeddings of a picture, but the model has {per_tile}"
        )
    cutter = CropCutter(
        placeholder=placeholder,
        side=side,
        per_tile=per_tile,
        crops=bool(stated.get("do_pan_and_scan")),
        min_side=stated.get("pan_and_scan_min_crop_size") or 256,
        most=stated.get("pan_and_scan_max_num_crops") or 4,
        min_ratio=stated.get("pan_and_scan_min_ratio_to_activate") or 1.2,
    )
    return ImageProcessor(Scaling.read(stated, _HALF, _HALF, Image.Resampling.BILINEAR), cutter)


@dataclass(frozen=True, slots=True)
class CropCutter:
    """See `PictureCutter`. The grid of a picture is its crops down and across; 0, 0: the whole picture only."""

    placeholder: str
    # Of the square to which the picture and its crops are resized.
    side: int
    per_tile: int
    # Whether pictures are cropped (pan and scan): those whose sides are in a ratio of `min_ratio` or more.
    crops: bool
    min_side: int
    most: int
    min_ratio: float

    def cut(self, image: Image.Image, scaling: Scaling, detail: Detail) -> tuple[Grid, Values]:
        """See `PictureCutter.cut`."""
        rows, columns = (0, 0) if detail is Detail.LOW else self._crops(image.height, image.width)
        parts = [image]
        if rows:
            height, width = math.ceil(image.height / rows), math.ceil(image.width / columns)
            parts += [
                image.crop((left, top, min(left + width, image.width), min(top + height, image.height)))
                for top, left in itertools.product(range(0, image.height, height), range(0, image.width, width))
            ]
        values = [channels_first(scaling.resize(part, self.side, self.side)) for part in parts]
        return (rows, columns), np.stack(values).reshape(len(parts), CHANNELS, self.side**2)

    def plan(self, grid: Grid) -> ImagePlan:
        """See `PictureCutter.plan`."""
        rows, columns = grid
        if min(rows, columns) < 0 or bool(rows) != bool(columns):
            raise ValueError(f"a grid of {grid}")
        crops = rows * columns
        tile = BEGIN + self.placeholder * self.per_tile + END
        text = tile
        if crops:
            text += _BREAK + _CROPS + _BREAK + f"{_BREAK} {_BREAK}".join([tile] * crops)
        return ImagePlan(
            values=(crops + 1, CHANNELS, self.side**2),
            pixels=(crops + 1, CHANNELS, self.side, self.side),
            frames=1,
            text=text,
            embeddings=(crops + 1) * self.per_tile,
            before=(_ORIGINAL if crops else "") + _BREAK,
            after=_BREAK,
        )

    def _crops(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of crops of a picture, down and across; 0, 0 without crops."""
        longer, shorter = max(height, width), min(height, width)
        if not self.crops or longer / shorter < self.min_ratio:
            return 0, 0
        count = min(longer // self.min_side, math.floor(longer / shorter + 0.5))
        count = min(max(count, 2), self.most)
        if min(math.ceil(longer / count), shorter) < self.min_side:
            return 0, 0
        return (1, count) if width >= height else (count, 1)
