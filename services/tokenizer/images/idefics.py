"""Pictures for Idefics3 and SmolVLM: cut into square tiles, and the whole picture as one more tile after them."""

from __future__ import annotations

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
# Of a side before a picture is cut.
MAX_SIDE = 4096
BORDER = "<fake_token_around_image>"
WHOLE = "<global-img>"


def read_idefics(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """Read a processor's file, and check it against the encoder in config.json.

    Raises:
        ConfigurationError: they do not belong together, or an option is not supported.
    """
    vision = config.get("vision_config") or {}
    side, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
    size, tile = stated.get("size") or {}, (stated.get("max_image_size") or {}).get("longest_edge", 364)
    longest = size.get("longest_edge") if size else 4 * 364
    if longest is None:
        raise ConfigurationError(f"image processor: a size of {size} is not supported")
    if tile != side:
        raise ConfigurationError(f"image processor: tiles of {tile} pixels, but the model's have {side}")
    splits = stated.get("do_image_splitting")
    cutter = TileCutter(
        placeholder=placeholder,
        longest=longest,
        tile=tile,
        splits=splits is not False,
        per_tile=(side // patch // config.get("scale_factor", 2)) ** 2,
    )
    return ImageProcessor(Scaling.read(stated, _HALF, _HALF, Image.Resampling.LANCZOS), cutter)


@dataclass(frozen=True, slots=True)
class TileCutter:
    """See `PictureCutter`. The grid of a picture is its tiles down and across; 0, 0: the whole picture only."""

    placeholder: str
    longest: int
    tile: int
    splits: bool
    per_tile: int

    def cut(self, image: Image.Image, scaling: Scaling, detail: Detail) -> tuple[Grid, Values]:
        """See `PictureCutter.cut`."""
        tile = self.tile
        image = scaling.resize(image, *self._longest_sides(image.height, image.width))
        rows = columns = 0
        tiles: list[Values] = []
        if self.splits and detail is not Detail.LOW:
            image = scaling.resize(image, *self._whole_tiles(image.height, image.width))
            if max(image.height, image.width) > tile:
                rows, columns = image.height // tile, image.width // tile
                values = channels_first(image).reshape(CHANNELS, rows, tile, columns, tile)
                tiles += list(values.transpose(1, 3, 0, 2, 4).reshape(rows * columns, CHANNELS, tile, tile))
        tiles.append(channels_first(scaling.resize(image, tile, tile)))
        return (rows, columns), np.stack(tiles).reshape(len(tiles), CHANNELS, tile * tile)

    def plan(self, grid: Grid) -> ImagePlan:
        """See `PictureCutter.plan`."""
        rows, columns = grid
        if min(rows, columns) < 0 or bool(rows) != bool(columns):
            raise ValueError(f"a grid of {grid}")
        tiles = rows * columns + 1
        return ImagePlan(
            values=(tiles, CHANNELS, self.tile**2),
            pixels=(tiles, CHANNELS, self.tile, self.tile),
            frames=1,
            text=self._text(rows, columns),
            embeddings=tiles * self.per_tile,
        )

    def _text(self, rows: int, columns: int) -> str:
        embeddings = self.placeholder * self.per_tile
        lines = [
            "".join(f"{BORDER}<row_{row}_col_{column}>{embeddings}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{BORDER}{WHOLE}{embeddings}{BORDER}"

    def _longest_sides(self, height: int, width: int) -> tuple[int, int]:
        """Return sides of which the longer one is `longest`, and the other one even."""
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            width, height = MAX_SIDE, int(MAX_SIDE / ratio)
        elif height > MAX_SIDE:
            height, width = MAX_SIDE, int(MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return sides that are multiples of a tile's."""
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return height, width
