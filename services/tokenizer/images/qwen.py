"""Pictures and videos for Qwen2.5-VL and Qwen3-VL: of about their own size, in patches whose squares become embeddings.

A patch covers two frames of a video; a picture is taken twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from common.errors import ConfigurationError
from services.tokenizer.images.processor import (
    CHANNELS,
    CLIP_DEVIATION,
    CLIP_MEAN,
    LOW_PIXELS,
    MAX_PIXEL_BYTES,
    Detail,
    ImagePlan,
    ImageProcessor,
    RefusedImageError,
    Scaling,
    VideoProcessor,
    channels_first,
)
from services.tokenizer.images.sampling import FrameSampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.tokenizer.images.processor import Grid, Values
    from services.tokenizer.images.sampling import FrameTimes

MAX_RATIO = 200


# By which Qwen3-VL scales videos where its file leaves that out.
_HALF = (0.5, 0.5, 0.5)
# Tokens around the embeddings of a picture, or of a step in time of Qwen3-VL's videos.
START, END = "<|vision_start|>", "<|vision_end|>"


def read_qwen(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """Read a processor's file, with that of videos within it, and check both against the encoder in config.json.

    Raises:
        ConfigurationError: they do not belong together, or an option is not supported.
    """
    cutter = _cutter(stated, config, placeholder, (14, 56 * 56, 28 * 28 * 1280))
    scaling = Scaling.read(stated, CLIP_MEAN, CLIP_DEVIATION, Image.Resampling.BICUBIC)
    return ImageProcessor(scaling, cutter, _video(stated["video_processor"], config, placeholder))


def _video(stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str) -> VideoProcessor:
    is_2_5 = config.get("model_type") == "qwen2_5_vl"
    patch, mean, deviation = (14, CLIP_MEAN, CLIP_DEVIATION) if is_2_5 else (16, _HALF, _HALF)
    square = (2 * patch) ** 2
    cutter = FrameCutter(
        _cutter(stated, config, placeholder, (patch, 128 * square, 768 * square)),
        tokens_per_second=(config.get("vision_config") or {}).get("tokens_per_second", 4) if is_2_5 else None,
    )
    count = stated.get("num_frames")
    sampling = FrameSampling(
        rate=float(stated.get("fps") or 2),
        fewest=int(stated.get("min_frames") or 4),
        most=int(stated.get("max_frames") or 768),
        count=None if count is None else int(count),
        step=cutter.cutter.frames,
        reaches_end=not is_2_5,
    )
    return VideoProcessor(Scaling.read(stated, mean, deviation, Image.Resampling.BICUBIC), cutter, sampling)


def _cutter(
    stated: Mapping[str, Any], config: Mapping[str, Any], placeholder: str, defaults: tuple[int, int, int]
) -> PatchCutter:
    """Read a file that leaves out the side of patches, the fewest or the most pixels if they are `defaults`."""
    size = dict(stated.get("size") or {})
    cutter = PatchCutter(
        placeholder=placeholder,
        patch=stated.get("patch_size", defaults[0]),
        merge=stated.get("merge_size", 2),
        frames=stated.get("temporal_patch_size", 2),
        min_pixels=stated.get("min_pixels") or size.get("shortest_edge", defaults[1]),
        max_pixels=stated.get("max_pixels") or size.get("longest_edge", defaults[2]),
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
    return cutter


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
        patches = self.patches(scaling.resize(image, height, width))
        return (1, height // self.patch, width // self.patch), patches

    def patches(self, image: Image.Image) -> Values:
        """Return the values [patches, channels, pixels of a patch] of a picture whose sides are whole squares."""
        rows, columns, patch, merge = image.height // self.patch, image.width // self.patch, self.patch, self.merge
        squares = channels_first(image).reshape(CHANNELS, rows // merge, merge, patch, columns // merge, merge, patch)
        return squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, CHANNELS, patch * patch)

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
        return self.sides(height, width, (1, 1), detail)

    def sides(
        self, height: int, width: int, frames: tuple[int, int], detail: Detail, max_pixels: int | None = None
    ) -> tuple[int, int]:
        """Return the same for frames that are within the bounds together; `frames` are their number and this rounded.

        `max_pixels` is a further bound.

        Raises:
            RefusedImageError: they are too narrow.
        """
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise RefusedImageError(f"is too narrow for the model: its sides differ by more than {MAX_RATIO} times")
        factor, (count, rounded) = self.patch * self.merge, frames
        low = max(self.min_pixels, min(self.max_pixels, LOW_PIXELS * count))
        most = low if detail is Detail.LOW else self.max_pixels
        if max_pixels is not None:
            most = min(most, max_pixels)
        down, across = (round(side / factor) * factor for side in (height, width))
        if rounded * down * across > most:
            shrink = math.sqrt((count * height * width) / most)
            down, across = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif rounded * down * across < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (count * height * width))
            down, across = (math.ceil(side * stretch / factor) * factor for side in (height, width))
        return down, across


@dataclass(frozen=True, slots=True)
class FrameCutter:
    """See `VideoCutter`. The grid of a video is its steps in time, of two frames each, and patches down and across."""

    cutter: PatchCutter
    tokens_per_second: int | None = None
    """Coordinates of a second (Qwen2.5-VL); None: the times are written before each step (Qwen3-VL)."""

    def cut(
        self,
        frames: Iterable[Image.Image],
        count: int,
        scaling: Scaling,
        detail: Detail,
        max_bytes: int | None = None,
    ) -> tuple[Grid, Values]:
        """See `VideoCutter.cut`; the last of an odd number of frames is taken twice."""
        cutter, step = self.cutter, self.cutter.frames
        if count < step:
            raise RefusedImageError(f"has fewer than {step} frames; send it as an image")
        first: tuple[int, int] | None = None
        height = width = 0
        cut: list[Values] = []
        for frame in frames:
            if first is None:
                first = frame.size
                bound = None if max_bytes is None else max_bytes // CHANNELS
                height, width = self._sides(frame.height, frame.width, count, detail, bound)
                _check_size(-(-count // step) * step * height * width * CHANNELS)
            if frame.size != first:
                raise RefusedImageError("has frames of different sizes")
            cut.append(cutter.patches(scaling.resize(frame, height, width)))
        cut += [cut[-1]] * (-count % step)
        steps, (patches, channels, pixels) = len(cut) // step, cut[0].shape
        values = np.stack(cut).reshape(steps, step, patches, channels, pixels).transpose(0, 2, 3, 1, 4)
        grid = steps, height // cutter.patch, width // cutter.patch
        return grid, values.reshape(steps * patches, channels, step * pixels)

    def plan(self, grid: Grid, times: FrameTimes) -> ImagePlan:
        """See `VideoCutter.plan`."""
        cutter, count = self.cutter, len(times.seconds)
        steps, rows, columns = grid
        whole = cutter.plan((1, rows, columns))
        if not 0 < steps == -(-count // cutter.frames):
            raise ValueError(f"a grid of {grid} for {count} frames")
        before, text, coordinates = "", whole.text * steps, ()
        if self.tokens_per_second is None:
            before, *rest = self._times(steps, times)
            text = f"{START}{whole.text}{END}" + "".join(f"{time}{START}{whole.text}{END}" for time in rest)
        else:
            # In the precision of `transformers`.
            interval = np.float32(self.tokens_per_second) * np.float32(cutter.frames / times.rate)
            if (steps - 1) * interval >= steps * whole.embeddings:
                raise RefusedImageError(
                    "is too slow for its size: its seconds have more positions than its tokens; send a shorter part"
                )
            coordinates = tuple((np.arange(steps, dtype=np.float32) * interval).astype(np.int64).tolist())
        return ImagePlan(
            values=(steps * rows * columns, CHANNELS, cutter.frames * cutter.patch**2),
            pixels=(steps * rows * columns, CHANNELS * cutter.frames * cutter.patch**2),
            frames=1,
            text=text,
            embeddings=steps * whole.embeddings,
            before=before,
            times=coordinates,
        )

    def _sides(
        self, height: int, width: int, count: int, detail: Detail, max_pixels: int | None = None
    ) -> tuple[int, int]:
        """Return the sides of frames, of which Qwen2.5-VL bounds each one, and Qwen3-VL all together.

        `max_pixels` bounds all together.
        """
        factor, step = self.cutter.patch * self.cutter.merge, self.cutter.frames
        padded, rounded = -(-count // step) * step, round(count / step) * step
        each = None if max_pixels is None else max_pixels // padded
        if self.tokens_per_second is not None:
            return self.cutter.sides(height, width, (1, 1), detail, each)
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return self.cutter.sides(height, width, (count, rounded), detail, None if each is None else each * rounded)

    def _times(self, steps: int, times: FrameTimes) -> list[str]:
        """Return the text of each step's time, which is halfway between its first and its last frame."""
        step = self.cutter.frames
        seconds = times.seconds + times.seconds[-1:] * (steps * step - len(times.seconds))
        return [f"<{(seconds[i] + seconds[i + step - 1]) / 2:.1f} seconds>" for i in range(0, steps * step, step)]


def _check_size(size: int) -> None:
    """Refuse a video before all of it is decoded: small files may have large frames."""
    if size > MAX_PIXEL_BYTES:
        raise RefusedImageError(
            f"takes {size} bytes at the model's resolution, and {MAX_PIXEL_BYTES} are allowed; send fewer or smaller "
            "frames, or with the detail low"
        )
