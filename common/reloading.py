"""Files that are read again when they change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from common.errors import ConfigurationError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

INTERVAL_S = 1.0


class Reloading(Generic[T]):
    """The parsed content of a file. If the changed file cannot be loaded, the last good value stays; this is logged."""

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], T],
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[T, T], None] = lambda _before, _after: None,
    ) -> None:
        """Load `path` now; `on_change` is called with the values before and after each change.

        Raises:
            ConfigurationError: it cannot be loaded.
        """
        self._path = path
        self._load = load
        self._clock = clock
        self._on_change = on_change
        self._signature = self._look()
        self._value = load(path)
        self._looked_at = clock()
        self._log = get_logger("reloading")

    @property
    def value(self) -> T:
        """The file's parsed content, at most `INTERVAL_S` old."""
        now = self._clock()
        if now - self._looked_at >= INTERVAL_S:
            self._looked_at = now
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        signature = self._look()
        if signature == self._signature:
            return
        self._signature, before = signature, self._value
        try:
            self._value = self._load(self._path)
        except ConfigurationError as error:
            self._log.error("file.not_reloaded", reason=str(error))
        else:
            self._log.info("file.reloaded", path=str(self._path))
            self._on_change(before, self._value)

    def _look(self) -> tuple[int, int, int] | None:
        """Return the file's modification time, size and inode; None if it cannot be read."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
