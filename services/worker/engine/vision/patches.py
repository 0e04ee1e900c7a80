"""What Qwen's encoders share: images as patches in rows and columns, whose squares become one embedding each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.kernels.gpu.libraries import has_triton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from services.worker.engine.vision.config import VisionConfig
    from services.worker.engine.vision.encoder import EncoderImage

# Patches of images that are computed together, unless one image has more.
BATCH_PATCHES = 16_384
_THETA = 10_000.0
_AXES = 3


def count_squares(shape: tuple[int, ...], grid: tuple[int, ...], config: VisionConfig) -> int:
    """Return the embeddings of pixels [patches, channels * frames * patch_size ** 2]; see `VisionEncoder.count`.

    The grid has patches in time, height and width; coordinates in time may follow. The patches of a square are
    neighbours.
    """
    inputs = config.channels * config.frames * config.patch_size**2
    grid, times = grid[:_AXES], grid[_AXES:]
    if times and len(times) != grid[0]:
        raise ValueError(f"{len(times)} coordinates in time of {grid[0]} steps")
    if len(grid) != _AXES or min(grid) < 1 or grid[1] % config.merge or grid[2] % config.merge:
        raise ValueError(f"a grid of {grid} patches cannot be divided into squares of {config.merge}")
    patches = grid[0] * grid[1] * grid[2]
    if shape != (patches, inputs):
        raise ValueError(f"pixels of the shape {shape}: {patches} patches of {inputs} numbers are expected")
    return patches // config.merge**2


@dataclass(frozen=True, slots=True)
class PatchPlaces:
    """Where the patches of an image are."""

    coordinates: NDArray[np.int64]  # [patches, 2] row and column of each
    frames: NDArray[np.int64]  # patches of each frame

    @classmethod
    def of(cls, grid: tuple[int, ...], merge: int) -> PatchPlaces:
        """Return those of an image that `count_squares` accepted."""
        frames, height, width = grid[:_AXES]
        blocks = height // merge, merge, width // merge, merge
        by_axis = [axis.reshape(blocks).swapaxes(1, 2).reshape(-1) for axis in np.indices((height, width))]
        coordinates = np.tile(np.stack(by_axis, axis=1), (frames, 1))
        return cls(coordinates, np.full(frames, height * width, np.int64))


class PatchRotation:
    """Rotary embedding by rows and columns: half of a head turns with each."""

    def __init__(self, head_dim: int, device: torch.device, *, are_mixed: bool = False) -> None:
        """Prepare the frequencies, which are the same for rows and columns, or belong to both by turns."""
        whole = head_dim if are_mixed else head_dim // 2
        exponents = torch.arange(0, whole, 2, dtype=torch.float32) / whole
        frequencies = 1.0 / _THETA**exponents
        # [axes, head_dim / 4]
        by_axis = torch.stack((frequencies[0::2], frequencies[1::2]) if are_mixed else (frequencies, frequencies))
        self._frequencies = by_axis.to(device)

    def angles(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return the angles [patches, head_dim / 2] float32 for `coordinates` [patches, 2]."""
        return (coordinates[:, :, None] * self._frequencies).flatten(1)


def rotate(qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate queries and keys of [patches, 3 * hidden] in place, by cosines and sines [patches, head_dim / 2] float32.

    In one program on a GPU that Triton serves.
    """
    if qkv.is_cuda and has_triton():
        # Imported here because it needs Triton.
        from services.worker.engine.kernels.gpu.patch_rotation import rotate as rotate_on_gpu

        rotate_on_gpu(qkv, cosines, sines)
        return
    halves = qkv.view(len(qkv), 3, -1, 2, cosines.shape[1])[:, :2]
    cosine, sine = cosines[:, None, None], sines[:, None, None]
    first, second = (half.float() for half in halves.unbind(3))
    halves.copy_(torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=3))


def joined_pixels(images: Sequence[EncoderImage], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the patches of images one after the other, on the device."""
    return torch.cat([image.pixels(device, dtype) for image in images])
