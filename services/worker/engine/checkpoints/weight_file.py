"""Bytes of a file of weights, read without mapping it and only while it does not change.

A process that touches a mapping ends by SIGBUS when another one has truncated the file meanwhile; and a read that meets
a truncation may return zeros.
"""

from __future__ import annotations

import os
import stat
import weakref
from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


class WeightFile:
    """A regular file, open for reading until this object is gone."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            OSError: it cannot be opened.
            ConfigurationError: it is no regular file.
        """
        self._path = path
        # A pipe would wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"{path} is damaged: it is no regular file")
        self.size = found.st_size
        self._state = found.st_size, found.st_mtime_ns

    def fill(self, part: str, left: memoryview, start: int) -> None:
        """Read as many bytes as `left` has, from `start` on, of `part` of the file.

        Raises:
            OSError: they cannot be read.
            ConfigurationError: the file ends before.
        """
        while left:
            count = os.preadv(self._descriptor, [left], start)
            if not count:
                raise ConfigurationError(f"{self._path} is damaged: it ends within {part}")
            start, left = start + count, left[count:]

    def check_unchanged(self, part: str) -> None:
        """Check that what was read of `part` is what the file had when it was opened.

        Raises:
            ConfigurationError: another process has changed it meanwhile.
        """
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != self._state:
            raise ConfigurationError(f"{self._path} is damaged: it changed while {part} was read")
