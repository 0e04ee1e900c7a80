"""Prepares pictures as models take them; a cutter for each family of models decides how.

The results are those of the processors of `transformers` that use Pillow, number for number. A processor cuts in a
confined process; everything else about a picture follows from the grid into which it has cut it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from PIL import Image

from common.errors import ConfigurationError
from common.types import PackedPixels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from services.tokenizer.images.sampling import FrameSampling, FrameTimes

# Values of 8 bits, [parts, channels, pixels of a part].
Values: TypeAlias = "NDArray[np.uint8]"
Grid: TypeAlias = tuple[int, ...]
# Any: free JSON; values are checked where they are read.
JsonObject: TypeAlias = dict[str, Any]

CHANNELS = 3
# Means and standard deviations by which CLIP's encoder (Radford et al. 2021) and many later ones scale pictures.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
# Pixels of a picture with `Detail.LOW`, for models that take pictures of any size.
LOW_PIXELS = 512 * 512
# Pixels of a request, as they travel. Messages of 64 MiB have its tokens and options beside them.
MAX_PIXEL_BYTES = 48 * 1024 * 1024


class RefusedImageError(Exception):
    """A picture that cannot be used; the text completes the sentence "the image …"."""


class Detail(Enum):
    """How closely a picture is looked at."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Shapes, text and number of embeddings that follow from the grid of a picture."""

    values: tuple[int, int, int]
    """The shape of its values."""
    pixels: tuple[int, ...]
    """The shape of what the encoder takes."""
    frames: int
    """How often the encoder takes each part, one after the other."""
    text: str
    """The text that stands in the prompt in place of the mark of an image; it has a placeholder for each embedding."""
    embeddings: int
    before: str = ""
    after: str = ""
    """Plain texts around `text`, whose tokens depend on what stands beside them."""
    times: tuple[int, ...] = ()
    """Of a video, the coordinate of each step in time, if the model's positions depend on these."""


class PictureCutter(Protocol):
    """Cuts pictures as the models of one family take them; a frozen dataclass of what decides how."""

    def cut(self, image: Image.Image, scaling: Scaling, detail: Detail) -> tuple[Grid, Values]:
        """Return a picture in mode RGB, resized by `scaling` and cut.

        Raises:
            RefusedImageError: the model cannot take a picture of such sides.
        """
        ...

    def plan(self, grid: Grid) -> ImagePlan:
        """Return shapes, text and number of embeddings of a picture with this grid.

        Raises:
            ValueError: `cut` returns no such grid.
        """
        ...


class VideoCutter(Protocol):
    """Cuts videos as the models of one family take them; a frozen dataclass of what decides how."""

    def cut(
        self,
        frames: Iterable[Image.Image],
        count: int,
        scaling: Scaling,
        detail: Detail,
        max_bytes: int | None = None,
    ) -> tuple[Grid, Values]:
        """Return `count` frames in mode RGB, each resized by `scaling` and cut before the next one is taken.

        They are resized to at most about `max_bytes` together.

        Raises:
            RefusedImageError: the model cannot take frames of such sides, so few, or so many.
        """
        ...

    def plan(self, grid: Grid, times: FrameTimes) -> ImagePlan:
        """Return shapes, text and number of embeddings of a video with frames at these times.

        Raises:
            RefusedImageError: the model has no positions for so slow a video.
            ValueError: `cut` returns no such grid.
        """
        ...


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """Prepares videos for one model."""

    scaling: Scaling
    cutter: VideoCutter
    sampling: FrameSampling


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares pictures for one model, and videos if it takes any."""

    scaling: Scaling
    cutter: PictureCutter
    video: VideoProcessor | None = None

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The numbers [channels, 256] that the encoder takes for values of 8 bits."""
        return self.scaling.table()

    @cached_property
    def video_table(self) -> NDArray[np.float32]:
        """The same for videos."""
        assert self.video is not None
        return self.video.scaling.table()

    @cached_property
    def settings(self) -> bytes:
        """Everything that decides the pixels of a picture; a part of its digest. Equal only for equal processors."""
        return repr(self).encode()

    def cut(self, image: Image.Image, detail: Detail) -> tuple[Grid, Values]:
        """Return a picture in mode RGB as the model takes it; its values are contiguous.

        Raises:
            RefusedImageError: the model cannot take a picture of such sides.
        """
        grid, values = self.cutter.cut(image, self.scaling, detail)
        return grid, np.ascontiguousarray(values)

    def cut_frames(
        self, frames: Iterable[Image.Image], count: int, detail: Detail, max_bytes: int | None = None
    ) -> tuple[Grid, Values]:
        """Return a video of `count` frames in mode RGB as the model takes it; its values are contiguous.

        They are resized to at most about `max_bytes` together.

        Raises:
            RefusedImageError: the model takes no videos, or cannot take frames of such sides, so few, or so many.
        """
        if self.video is None:
            raise RefusedImageError("is a video, and the model takes none")
        grid, values = self.video.cutter.cut(frames, count, self.video.scaling, detail, max_bytes)
        return grid, np.ascontiguousarray(values)

    def plan(self, grid: Grid) -> ImagePlan:
        """Return shapes, text and number of embeddings of a picture with this grid.

        Raises:
            ValueError: `cut` returns no such grid.
        """
        return self.cutter.plan(grid)


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A picture as the scheduler and the workers get it; its texts stand for it in the prompt, see `ImagePlan`."""

    digest: bytes
    grid: Grid
    pixels: PackedPixels
    text: str
    embeddings: int
    before: str = ""
    after: str = ""

    @property
    def nbytes(self) -> int:
        """The room that its pixels take."""
        return self.pixels.nbytes


def prepared(processor: ImageProcessor, grid: Grid, values: bytes) -> PreparedImage:
    """Return a picture of which a confined process has returned the grid and the values.

    Raises:
        ValueError: they do not belong together.
    """
    _check_cells(grid, values)
    return _prepared(processor.settings, processor.table, grid, values, processor.plan(grid))


def prepared_video(processor: ImageProcessor, grid: Grid, values: bytes, times: FrameTimes) -> PreparedImage:
    """Return a video with frames at `times`, of which a confined process has returned the grid and the values.

    Raises:
        RefusedImageError: the model has no positions for so slow a video.
        ValueError: they do not belong together, or the model takes no videos.
    """
    _check_cells(grid, values)
    if processor.video is None:
        raise ValueError("a video for a model that takes none")
    plan = processor.video.cutter.plan(grid, times)
    return _prepared(processor.settings, processor.video_table, (*grid, *plan.times), values, plan)


def _check_cells(grid: Grid, values: bytes) -> None:
    # The text of a plan is as long as the grid is large, and each of its cells has values.
    if min(grid, default=0) < 0 or math.prod(grid) > len(values):
        raise ValueError("a grid of more cells than there are values")


def _prepared(settings: bytes, table: NDArray[np.float32], grid: Grid, values: bytes, plan: ImagePlan) -> PreparedImage:
    array = np.frombuffer(values, np.uint8).reshape(plan.values)
    digest = sha256(settings)
    digest.update(repr(grid).encode())
    digest.update(values)
    pixels = PackedPixels(array, table, plan.frames, plan.pixels)
    return PreparedImage(digest.digest(), grid, pixels, plan.text, plan.embeddings, plan.before, plan.after)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How values of 8 bits become numbers, and the filter with which pictures are resized."""

    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    filter: Image.Resampling

    @classmethod
    def read(cls, stated: Mapping[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...],
             filter_: Image.Resampling) -> Scaling:  # fmt: skip
        """Read a processor's file; what it leaves out has the given values.

        Raises:
            ConfigurationError: it leaves out a step that all supported models need.
        """
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if stated.get(step) is False:
                raise ConfigurationError(f"image processor: {step} = false is not supported")
        factor, resample = stated.get("rescale_factor"), stated.get("resample")
        return cls(
            factor=1 / 255 if factor is None else float(factor),
            mean=_by_channel(stated.get("image_mean"), mean),
            deviation=_by_channel(stated.get("image_std"), deviation),
            filter=filter_ if resample is None else Image.Resampling(int(resample)),
        )

    def table(self) -> NDArray[np.float32]:
        """Return the numbers [channels, 256] for values of 8 bits."""
        # In the precisions of `transformers`: scaled in float64, the rest in float32.
        scaled = (np.arange(256, dtype=np.uint8).astype(np.float64) * self.factor).astype(np.float32)
        mean, deviation = np.array(self.mean, np.float32), np.array(self.deviation, np.float32)
        return (scaled[None, :] - mean[:, None]) / deviation[:, None]

    def resize(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Return a picture of other sides.

        Raises:
            RefusedImageError: a side would have no pixels.
        """
        if min(height, width) < 1:
            raise RefusedImageError(f"is too narrow for the model: {image.width} x {image.height} pixels")
        return image.resize((width, height), self.filter)


def channels_first(image: Image.Image) -> Values:
    """Return the values [channels, height, width] of a picture."""
    return np.asarray(image).transpose(2, 0, 1)


def _by_channel(stated: object, default: tuple[float, ...]) -> tuple[float, ...]:
    if stated is None:
        return default
    values = [stated] * CHANNELS if isinstance(stated, int | float) else stated
    if not isinstance(values, list) or len(values) != CHANNELS:
        raise ConfigurationError(f"image processor: {CHANNELS} numbers are expected, not {stated!r}")
    return tuple(map(float, values))
