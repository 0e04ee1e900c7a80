"""Packed pixels become the numbers of the model's processor when they are encoded, whole or by parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.types import PackedPixels
from services.worker.engine.vision.encoder import EncoderImage

RANDOM = np.random.default_rng(5)
TABLE = RANDOM.normal(size=(3, 256)).astype(np.float32)
CPU = torch.device("cpu")


def packed(parts: int, size: int, frames: int, *shape: int) -> PackedPixels:
    values = RANDOM.integers(0, 256, (parts, 3, size)).astype(np.uint8)
    # As they arrive: parts of a message cannot be written.
    values.flags.writeable = False
    return PackedPixels(values, TABLE, frames, shape)


@pytest.mark.parametrize(
    "given",
    [packed(4, 6, 2, 4, 36), packed(2, 16, 1, 2, 3, 4, 4), packed(1, 20, 1, 3, 4, 5)],
    ids=["patches", "tiles", "whole"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_pixels_are_unpacked_as_their_processor_makes_them(given: PackedPixels, dtype: torch.dtype) -> None:
    image = EncoderImage(given, (1, 2))
    assert image.shape == given.shape
    expected = torch.from_numpy(given.unpacked()).to(dtype)
    assert torch.equal(image.pixels(CPU, dtype), expected)


@pytest.mark.parametrize("are_packed", [True, False])
def test_tiles_are_unpacked_one_by_one(are_packed: bool) -> None:
    given = packed(5, 16, 1, 5, 3, 4, 4)
    image = EncoderImage(given if are_packed else given.unpacked(), (2, 2))
    tiles = [image.pixels(CPU, torch.float32, i, 1) for i in range(5)]
    assert np.array_equal(torch.cat(tiles).numpy(), given.unpacked())
