"""Containers of videos: which one a file is, and whether all of it is there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from services.tokenizer.images.processor import RefusedImageError

# Names of FFmpeg's demuxers.
MP4: Final = "mov,mp4,m4a,3gp,3g2,mj2"
MATROSKA: Final = "matroska,webm"
EXPECTED: Final = "supported are MP4 and WebM"
# Boxes with which files of MP4 and QuickTime begin.
_FIRST_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_BOX_HEAD: Final = 8
_LARGE_BOX_HEAD: Final = 16
_EBML: Final = b"\x1a\x45\xdf\xa3"
_SEGMENT: Final = b"\x18\x53\x80\x67"


def can_be_decoded() -> bool:
    """Return whether PyAV is installed, which decodes videos in files."""
    return find_spec("av") is not None


def container_of(data: bytes) -> str:
    """Return the name of the demuxer for a file, by its first bytes.

    Raises:
        RefusedImageError: it is no such container, or its end is missing.
    """
    if data.startswith(_EBML):
        name, end = MATROSKA, _end_of_segment(data)
    elif data[4:8] in _FIRST_BOXES:
        name, end = MP4, _end_of_boxes(data)
    else:
        raise RefusedImageError(f"is damaged, or not a video; {EXPECTED}")
    if end > len(data):
        raise RefusedImageError(f"is cut off: it has {len(data)} of its {end} bytes")
    return name


def _end_of_boxes(data: bytes) -> int:
    """Return where the last box of the topmost level ends, by its stated size."""
    place = 0
    while place + _BOX_HEAD <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if size == 1:
            size = int.from_bytes(data[place + _BOX_HEAD : place + _LARGE_BOX_HEAD], "big")
        # 0: up to the end of the file. Other sizes are no box.
        if size < _BOX_HEAD:
            break
        place += size
    return place


def _end_of_segment(data: bytes) -> int:
    """Return where the segment ends, by its stated size; 0: files that are written as they are sent state none."""
    size, place = _number(data, len(_EBML))
    if size is None:
        return 0
    place += size
    if data[place : place + len(_SEGMENT)] != _SEGMENT:
        return 0
    size, place = _number(data, place + len(_SEGMENT))
    return 0 if size is None else place + size


def _number(data: bytes, place: int) -> tuple[int | None, int]:
    """Return a number of variable length, and the place after it; None: it is unknown, or there is none."""
    first = data[place] if place < len(data) else 0
    if not first:
        return None, place
    length = 9 - first.bit_length()
    bits = 7 * length
    value = int.from_bytes(data[place : place + length], "big") & ((1 << bits) - 1)
    return (None if value == (1 << bits) - 1 else value), place + length
