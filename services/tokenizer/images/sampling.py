"""Chooses frames of videos as the processors of `transformers` do, number for number, and says when each is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a file: three hours of 24 frames a second.
MAX_FRAMES: Final = 262_144
MAX_SECONDS: Final = 86_400


@dataclass(frozen=True, slots=True)
class Footage:
    """The frames of a file, all of equal duration: how many there are, and how many of them are a second."""

    frames: int
    rate: float


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When each of the frames that a model gets is shown, in seconds; and how many of them are a second on average."""

    rate: float
    seconds: tuple[float, ...]

    @classmethod
    def even(cls, count: int, rate: float) -> FrameTimes:
        """Return the times of `count` frames that follow each other at `rate`."""
        return cls(rate, tuple(i / rate for i in range(count)))

    @classmethod
    def chosen(cls, footage: Footage, places: Sequence[int]) -> FrameTimes:
        """Return the times of some of a file's frames."""
        rate = len(places) / footage.frames * footage.rate
        return cls(rate, tuple(place / footage.rate for place in places))


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """How many frames of a file the processor of a model takes, and which ones."""

    rate: float
    """Frames per second where requests do not say so."""
    fewest: int
    most: int
    count: int | None = None
    """The number of frames of every video, whatever its duration; None: it follows from the rate."""
    step: int = 2
    """Frames of a step in time."""
    reaches_end: bool = True
    """Whether the last frame is always taken (Qwen3-VL), or whole steps of frames at equal distances (Qwen2.5-VL)."""

    def choose(self, footage: Footage, rate: float | None, most: int) -> list[int]:
        """Return the places of up to `most` frames in ascending order; `rate` is the request's, in frames per second.

        All of them if there are fewer than a step in time has.
        """
        if footage.frames < self.step:
            return list(range(footage.frames))
        most = min(most, footage.frames)
        count: float
        if self.count is not None and rate is None:
            count = self.count if self.reaches_end else round(self.count / self.step) * self.step
        else:
            count = min(max(footage.frames / footage.rate * (rate or self.rate), self.fewest), self.most)
        whole = max(self.step, math.floor(min(count, most)))
        if self.reaches_end:
            return _spread(footage.frames, whole)
        return _at_distances(footage.frames, whole // self.step * self.step)


def _spread(frames: int, count: int) -> list[int]:
    # Qwen3VLVideoProcessor.sample_frames
    places: list[int] = np.linspace(0, frames - 1, count).round().astype(int).tolist()
    return places


def _at_distances(frames: int, count: int) -> list[int]:
    # Qwen2VLVideoProcessor.sample_frames, in the precision of torch.arange.
    distance = frames / count
    places = np.arange(math.ceil(frames / distance)) * distance
    found: list[int] = places.astype(np.float32).astype(int).tolist()
    return [place for place in found if place < frames]
