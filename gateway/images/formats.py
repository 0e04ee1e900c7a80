"""Formats of images, by their first bytes."""

from __future__ import annotations

import re

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
HEAD_BYTES = 64


def problem_of(content: bytes) -> str | None:
    """Return why `content` is no image that can be read, judged by its first bytes; None: it may be one."""
    head = content[:HEAD_BYTES]
    if not head:
        return "is empty"
    if _SUPPORTED.match(head):
        return None
    for pattern, name in _OTHERS:
        if pattern.match(head):
            return f"is {name}, which is not supported"
    return "is not an image"
