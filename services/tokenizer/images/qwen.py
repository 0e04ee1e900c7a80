"""Pictures for Qwen2.5-VL and Qwen3-VL: of about their own size, in patches whose squares become one embedding each."""

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
    RefusedImageError,
    Scaling,
    channels_first,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.tokenizer.images.processor import Grid, Values

MAX_RATIO = 200


def read_qwen(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """Read a processor's file, and check it against the encoder in config.json.

    Raises:
        ConfigurationError: they do not belong together, or an option is not supported.
    """
    size = dict(stated.get("size") or {})
    cutter = PatchCutter(
        placeholder=placeholder,
        patch=stated.get("patch_size", 14),
        merge=stated.get("merge_size", 2),
        frames=stated.get("temporal_patch_size", 2),
        min_pixels=stated.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        max_pixels=stated.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
    )
    vision = config.get("vision_config") or {}
    default = 14 if config.get("model_type") == "qwen2_5_vl" else 16
    wanted = (
        vision.get("patch_size", default), vision.get("spatial_merge_size", 2),
        vision.get("temporal_patch_size", 2),
    )  # fmt: skip
    own = cutter.patch, cutter.merge, cutter.frames
    if own != wanted:
        raise ConfigurationError(
            f"image processor: patches of {own[0]}, squares of {own[1]} and {own[2]} frames, but the model has "
            f"{wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    return ImageProcessor(Scaling.read(stated, CLIP_MEAN, CLIP_DEVIATION, Image.Resampling.BICUBIC), cutter)


@dataclass(frozen=True, slots=True)
class PatchCutter:
    """See `PictureCutter`. The grid of a picture is 1 and its patches down and across; squares are neighbours."""

    placeholder: str
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int

    def cut(self, image: Image.Image, scaling: Scaling, detail: Detail) -> tuple[Grid, Values]:
        """See `PictureCutter.cut`."""
        height, width = self._sides(image.height, image.width, detail)
        values = channels_first(scaling.resize(image, height, width))
        rows, columns, patch, merge = height // self.patch, width // self.patch, self.patch, self.merge
        squares = values.reshape(CHANNELS, rows // merge, merge, patch, columns // merge, merge, patch)
        patches = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, CHANNELS, patch * patch)
        return (1, rows, columns), patches

    def plan(self, grid: Grid) -> ImagePlan:
        """See `PictureCutter.plan`."""
        frames, rows, columns = grid
        if frames != 1 or min(rows, columns) < 1 or rows % self.merge or columns % self.merge:
            raise ValueError(f"a grid of {grid}")
        patches, embeddings = rows * columns, rows * columns // self.merge**2
        return ImagePlan(
            values=(patches, CHANNELS, self.patch**2),
            pixels=(patches, CHANNELS * self.frames * self.patch**2),
            frames=self.frames,
            text=self.placeholder * embeddings,
            embeddings=embeddings,
        )

    def _sides(self, height: int, width: int, detail: Detail) -> tuple[int, int]:
        """Return sides of whole squares, with a number of pixels within the bounds and about the same ratio."""
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise RefusedImageError(f"is too narrow for the model: its sides differ by more than {MAX_RATIO} times")
        factor = self.patch * self.merge
        most = max(self.min_pixels, min(self.max_pixels, LOW_PIXELS)) if detail is Detail.LOW else self.max_pixels
        down, across = (round(side / factor) * factor for side in (height, width))
        if down * across > most:
            shrink = math.sqrt((height * width) / most)
            down, across = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif down * across < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            down, across = (math.ceil(side * stretch / factor) * factor for side in (height, width))
        return down, across
