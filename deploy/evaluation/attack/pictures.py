"""Pictures as PNG files, with names and identifiers that say nothing about them."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np

SIDE = 168
"""In pixels: whole squares of patches of usual encoders (14 and 16 pixels, 2 x 2), so that pictures are not resized."""
# The generator polynomial of CRC-32: pixels that differ by it, wherever that is, have the same CRC.
_GENERATOR = 0x104C11DB7
_GENERATOR_BITS = 33
_EXIF_IFD, _IMAGE_UNIQUE_ID = 0x8769, 0xA420
_LONG, _ASCII = 4, 2


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of noise, drawn by its `seed`; `name` and `unique_id` (EXIF) are what its file says of it.

    A `twin` is another picture whose pixels differ in a few bytes and have the same CRC-32.
    """

    seed: int
    name: str = "photo.png"
    unique_id: str = "0" * 32
    is_twin: bool = False

    def pixels(self) -> bytes:
        """Return its rows of RGB pixels, one after the other."""
        chance = np.random.default_rng(self.seed)
        pixels = bytearray(chance.integers(0, 256, SIDE * SIDE * 3, np.uint8).tobytes())
        if self.is_twin:
            first = 3 * SIDE * (SIDE // 2)
            for bit in range(_GENERATOR_BITS):
                # CRC-32 takes the lowest bit of each byte first.
                if _GENERATOR >> (_GENERATOR_BITS - 1 - bit) & 1:
                    pixels[first + bit // 8] ^= 1 << bit % 8
        return bytes(pixels)

    def file(self) -> bytes:
        """Return it as a PNG file."""
        pixels, width = self.pixels(), 3 * SIDE
        rows = b"".join(b"\0" + pixels[start : start + width] for start in range(0, len(pixels), width))
        chunks = (
            (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)),
            (b"tEXt", b"Title\0" + self.name.encode("latin-1")),
            (b"eXIf", _exif(self.unique_id)),
            (b"IDAT", zlib.compress(rows, 1)),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)

    def data_url(self) -> str:
        """Return its file as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.file()).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _exif(unique_id: str) -> bytes:
    """Return EXIF data with an ImageUniqueID alone: a directory with a pointer to another one with the text."""
    text = unique_id.encode("ascii") + b"\0"
    second = 8 + 2 + 12 + 4
    at = second + 2 + 12 + 4
    entry = struct.Struct("<HHII")
    return b"".join(
        (
            b"II*\0" + struct.pack("<I", 8),
            struct.pack("<H", 1) + entry.pack(_EXIF_IFD, _LONG, 1, second) + struct.pack("<I", 0),
            struct.pack("<H", 1) + entry.pack(_IMAGE_UNIQUE_ID, _ASCII, len(text), at) + struct.pack("<I", 0),
            text,
        )
    )
