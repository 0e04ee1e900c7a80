"""Writes the cache's decisions to a file, on a separate thread."""

from __future__ import annotations

import os
import queue
import stat
import threading
from typing import TYPE_CHECKING, BinaryIO

from common.errors import ConfigurationError
from common.logs import get_logger
from services.scheduler.cache.debug.replay import encode, encode_end

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from services.scheduler.cache.debug.decisions import Decision

# Maximum number of decisions waiting to be written: seconds of a busy scheduler, and some tens of MB.
BUFFERED_DECISIONS = 8_192
OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_STOP = b""


class DecisionLog:
    """Appends lines that `cache/debug/replay.py` reads.

    The file holds every prompt as token ids and the names of all users, so only its owner may read it. `note` never
    blocks: if the disk is too slow, the log ends with a line that marks its end, as a replay cannot skip anything, and
    later decisions are counted as lost.
    """

    def __init__(self, path: Path, limit: int = BUFFERED_DECISIONS) -> None:
        """Open `path` for appending, readable by its owner only.

        Raises:
            ConfigurationError: the file cannot be written, or is not a regular file.
        """
        self.lost_decisions = 0
        self._path = path
        self._log = get_logger("decisions")
        self._number = 0
        self._is_ended = True
        self._lines: queue.Queue[tuple[int, Decision] | bytes] = queue.Queue(limit)
        self._file = _open(path)
        self._thread = threading.Thread(target=self._write, name="decision-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write pending lines, and close the file."""
        self.close()

    def begin(self, header: bytes) -> None:
        """Start a new log section for another cache. May block on the disk."""
        self._lines.put(header)
        self._number = 0
        self._is_ended = False

    def note(self, decision: Decision) -> None:
        """Record one decision; the caller must not modify it afterwards."""
        if self._is_ended:
            self.lost_decisions += 1
            return
        self._number += 1
        try:
            self._lines.put_nowait((self._number, decision))
        except queue.Full:
            self._is_ended = True
            self.lost_decisions += 1
            self._log.error("decision_log.ended", path=str(self._path), operations=self._number - 1, cause="slow disk")

    def close(self) -> None:
        """Write pending lines, and close the file."""
        self._lines.put(_STOP)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        """Write lines until `_STOP`; after an error, keep draining the queue without writing."""
        is_broken, says_how_it_ends = False, True
        while True:
            line = self._lines.get()
            is_last = line == _STOP
            try:
                if not is_last and not is_broken:
                    self._file.write((line if isinstance(line, bytes) else encode(*line)) + b"\n")
                    says_how_it_ends = False
                if (is_last or self._lines.empty()) and not is_broken:
                    if self._is_ended and not says_how_it_ends:
                        self._file.write(encode_end() + b"\n")
                        says_how_it_ends = True
                    self._file.flush()
            except OSError as error:
                is_broken = self._is_ended = True
                self._log.error("decision_log.ended", path=str(self._path), cause=str(error))
            if is_last:
                return


def _open(path: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, OWNER_ONLY)
    except OSError as error:
        raise ConfigurationError(f"scheduler.cache.decision_log {path}: {error.strerror}") from error
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise ConfigurationError(f"scheduler.cache.decision_log {path}: no plain file")
    os.fchmod(descriptor, OWNER_ONLY)
    # A process that was killed may have left a partial line.
    if state.st_size and os.pread(descriptor, 1, state.st_size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return os.fdopen(descriptor, "ab")
