"""The console's files, read once at start."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).with_name("static")
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def load_files(root: Path = ROOT) -> Mapping[str, ConsoleFile]:
    """Return all files below `root` that browsers load, by their relative paths."""
    return {
        path.relative_to(root).as_posix(): _load(path) for path in sorted(root.rglob("*")) if path.suffix in MEDIA_TYPES
    }


def _load(path: Path) -> ConsoleFile:
    content = path.read_bytes()
    return ConsoleFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
