"""A disk that fills while a program writes: it has room for so many bytes, and then fails as the system does (ENOSPC).

As the system does, it writes what fits of a block before it fails.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.fakes.hub_client import main

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Room:
    """The bytes that are left, for all files together."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()

    def take(self, wanted: int) -> int:
        """Use at most `wanted` bytes; return how many.

        Raises:
            OSError: none are left.
        """
        with self._lock:
            taken = min(wanted, self._count)
            self._count -= taken
        if wanted and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


class _File(io.FileIO):
    def __init__(self, path: Path, mode: str, room: Room) -> None:
        super().__init__(path, mode)
        self._room = room

    def write(self, data: Any, /) -> int:  # Any: a buffer
        view = memoryview(data)
        return super().write(view[: self._room.take(view.nbytes)])


def filling_disk(folder: Path, count: int) -> AbstractContextManager[Any]:
    """Return a context in which files below `folder` that `Path.open` opens have room for `count` bytes more."""
    room, opened = Room(count), Path.open

    def limited(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode in ("ab", "wb") and path.is_relative_to(folder):
            return io.BufferedWriter(_File(path, mode, room))
        return opened(path, mode, *arguments, **options)

    return patch.object(Path, "open", limited)


if __name__ == "__main__":
    with filling_disk(Path(os.environ["HF_HOME"]), int(sys.argv[1])):
        main(*sys.argv[2:])
