"""Pixels of images survive encoding and decoding, as float32 and packed; what does not fit together is refused."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.types import PackedPixels
from common.wire.images import pixels_from_wire, pixels_to_wire
from protos.gen.pando.v1 import scheduler_pb2, worker_pb2

RANDOM = np.random.default_rng(3)
TABLE = RANDOM.normal(size=(3, 256)).astype(np.float32)


def packed(parts: int, size: int, frames: int, *shape: int) -> PackedPixels:
    return PackedPixels(RANDOM.integers(0, 256, (parts, 3, size)).astype(np.uint8), TABLE, frames, shape)


@pytest.mark.parametrize("kind", [scheduler_pb2.PromptImage, worker_pb2.RowImage])
@pytest.mark.parametrize(
    "pixels",
    [packed(4, 6, 2, 4, 36), packed(2, 16, 1, 2, 3, 4, 4), packed(1, 20, 1, 3, 4, 5)],
    ids=["patches", "tiles", "whole"],
)
def test_packed_pixels_arrive_as_they_were(
    pixels: PackedPixels, kind: type[scheduler_pb2.PromptImage | worker_pb2.RowImage]
) -> None:
    message = kind()
    pixels_to_wire(pixels, message)
    found = pixels_from_wire(kind.FromString(message.SerializeToString()))
    assert isinstance(found, PackedPixels)
    assert found.nbytes == pixels.nbytes
    assert np.array_equal(found.unpacked(), pixels.unpacked())
    assert found.unpacked().shape == pixels.shape


def test_frames_of_a_part_follow_each_other_within_a_channel() -> None:
    pixels = packed(2, 4, 2, 2, 3, 2, 4)
    unpacked = pixels.unpacked()
    for part, channel in np.ndindex(2, 3):
        expected = TABLE[channel][pixels.values[part, channel]]
        assert np.array_equal(unpacked[part, channel], [expected, expected])


def test_float32_arrives_as_it_was() -> None:
    pixels = RANDOM.normal(size=(2, 5)).astype(np.float32)
    message = worker_pb2.RowImage()
    pixels_to_wire(pixels, message)
    assert np.array_equal(np.asarray(pixels_from_wire(message)), pixels)


@pytest.mark.parametrize(
    ("field", "value"), [("parts", 5), ("parts", 0), ("frames", 1), ("shape", [4, 35]), ("table", [])]
)
def test_packed_pixels_that_do_not_fit_together_are_refused(field: str, value: object) -> None:
    message = scheduler_pb2.PromptImage()
    pixels_to_wire(packed(4, 6, 2, 4, 36), message)
    message.packed.ClearField(field)  # type: ignore[arg-type]  # the name of a field
    if isinstance(value, list):
        getattr(message.packed, field).extend(value)
    else:
        setattr(message.packed, field, value)
    with pytest.raises(InvalidRequestError, match="packed values of pixels") as caught:
        pixels_from_wire(message)
    assert caught.value.param == "pixels"
