"""The pixels of images on their way to workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from common.errors import InvalidRequestError
from common.types import PackedPixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from protos.gen.pando.v1 import common_pb2, scheduler_pb2, worker_pb2

    ImageMessage: TypeAlias = scheduler_pb2.PromptImage | worker_pb2.RowImage

LEVELS = 256


def pixels_to_wire(pixels: NDArray[np.float32] | PackedPixels, message: ImageMessage) -> None:
    """Write pixels into an image's message, which should be in its place in the message that is sent.

    Putting a message into another one copies it, at each level: milliseconds for the pixels of a photograph.
    """
    if isinstance(pixels, PackedPixels):
        packed = message.packed
        packed.values = pixels.values.tobytes()
        packed.table.extend(pixels.table.ravel().tolist())
        packed.parts, packed.frames = len(pixels.values), pixels.frames
        packed.shape.extend(pixels.shape)
    else:
        message.pixels = pixels.astype("<f4", copy=False).tobytes()
        message.shape.extend(pixels.shape)


def pixels_from_wire(message: ImageMessage) -> NDArray[np.float32] | PackedPixels:
    """Decode the pixels of an image, which has some.

    Raises:
        InvalidRequestError: there are more or fewer than their shape has.
    """
    if message.HasField("packed"):
        return _packed_from_wire(message.packed)
    # Each access to a field of bytes copies them.
    sides, pixels = tuple(message.shape), message.pixels
    if len(pixels) != 4 * math.prod(sides):
        raise InvalidRequestError(f"{len(pixels)} bytes of pixels of the shape {list(sides)}", param="pixels")
    return np.frombuffer(pixels, "<f4").reshape(sides)


def _packed_from_wire(message: common_pb2.PackedPixels) -> PackedPixels:
    sides, channels, packed = tuple(message.shape), len(message.table) // LEVELS, message.values
    is_whole = channels and message.parts and len(message.table) == channels * LEVELS
    size, parts = len(packed), message.parts
    if not is_whole or size % (parts * channels) or size * message.frames != math.prod(sides):
        raise InvalidRequestError(f"{size} packed values of pixels of the shape {list(sides)}", param="pixels")
    values = np.frombuffer(packed, np.uint8).reshape(parts, channels, -1)
    table = np.array(message.table, np.float32).reshape(channels, LEVELS)
    return PackedPixels(values, table, message.frames, sides)
