"""Formats of images and videos, by their first bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# What clients send that is no supported image, by its first bytes.
_OTHERS = (
    (re.compile(rb"\s*(<\?xml|<!--|<!DOCTYPE svg|<svg)", re.IGNORECASE), "SVG or XML"),
    (re.compile(rb"\s*<(!DOCTYPE )?html", re.IGNORECASE), "a web page"),
    (re.compile(rb"BM"), "BMP"),
    (re.compile(rb"II\*\x00|MM\x00\*|II\+\x00|MM\x00\+"), "TIFF"),
    (re.compile(rb"....ftyp(avif|avis)", re.DOTALL), "AVIF"),
    (re.compile(rb"....ftyp(hei[cfsmx]|hev[cm]|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb"....ftyp", re.DOTALL), "video"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "video"),
    (re.compile(rb"\x00\x00\x00\x0cJXL |\xff\x0a"), "JPEG XL"),
    (re.compile(rb"\x00\x00\x00\x0cjP|\xff\x4f\xff\x51"), "JPEG 2000"),
    (re.compile(rb"\x00\x00[\x01\x02]\x00"), "ICO"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"\x1f\x8b"), "gzip"),
)
_SUPPORTED = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP", re.DOTALL)
# What clients send as a video, and is none that is supported.
_OTHER_VIDEOS = (
    (re.compile(rb"....ftyp(avif|avis)", re.DOTALL), "AVIF"),
    (re.compile(rb"....ftyp(hei[cfsmx]|hev[cm]|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb"RIFF....AVI ", re.DOTALL), "AVI"),
    (re.compile(rb"FLV\x01"), "Flash video"),
    (re.compile(rb"OggS"), "Ogg"),
    (re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"), "Windows Media"),
    (re.compile(rb"\x00\x00\x01[\xba\xb3]"), "MPEG"),
    (re.compile(rb"\x47.{187}\x47", re.DOTALL), "MPEG-TS"),
    (re.compile(rb"#EXTM3U|\s*<(\?xml|MPD)"), "a playlist"),
    (re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP", re.DOTALL), "an image"),
)
# MP4, QuickTime, and Matroska with WebM.
_SUPPORTED_VIDEOS = re.compile(rb"....(ftyp|moov|mdat|wide|free|skip)|\x1a\x45\xdf\xa3", re.DOTALL)
HEAD_BYTES = 64
VIDEO_HEAD_BYTES = 192


def problem_of(content: bytes) -> str | None:
    """Return why `content` is no image that can be read, judged by its first bytes; None: it may be one."""
    head = content[:HEAD_BYTES]
    if not head:
        return "is empty"
    if _SUPPORTED.match(head):
        return None
    return _other(head, _OTHERS) or "is not an image"


def problem_of_video(content: bytes) -> str | None:
    """Return why `content` is no file of a video that can be read, by its first bytes; None: it may be one."""
    head = content[:VIDEO_HEAD_BYTES]
    if not head:
        return "is empty"
    problem = _other(head, _OTHER_VIDEOS)
    if problem is None and not _SUPPORTED_VIDEOS.match(head):
        problem = "is not a video"
    return problem and f"{problem}; send MP4 or WebM"


def _other(head: bytes, formats: Sequence[tuple[re.Pattern[bytes], str]]) -> str | None:
    return next((f"is {name}, which is not supported" for pattern, name in formats if pattern.match(head)), None)
