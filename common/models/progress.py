"""Reports of a download's progress."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 5.0


class DownloadReport(Protocol):
    """Receives the progress of one model's download; `advance` is called by several threads."""

    def begin(self, model: str, files: int, total: int) -> None:
        """A download of `files` files with `total` bytes begins; bytes that are on disk are counted as advances."""

    def advance(self, count: int) -> None:
        """`count` bytes have arrived; negative if a server had to send some again."""

    def end(self) -> None:
        """The download has ended, complete or not."""


@dataclass(frozen=True, slots=True)
class DownloadState:
    """The progress of a download at one moment, in bytes."""

    model: str
    files: int
    done: int
    total: int


class PeriodicReport:
    """Passes the state on when a download begins and ends, and every few seconds between."""

    def __init__(self, emit: Callable[[DownloadState], None], interval_s: float = INTERVAL_S) -> None:
        """Pass states to `emit`, which is called by one thread at a time."""
        self._emit = emit
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._state = DownloadState("", 0, 0, 0)
        self._emitted_at = 0.0

    def begin(self, model: str, files: int, total: int) -> None:
        """Pass the state on."""
        self._state = DownloadState(model, files, 0, total)
        self._emit_now()

    def advance(self, count: int) -> None:
        """Count; pass the state on if the last time is long enough ago."""
        with self._lock:
            state = self._state
            self._state = DownloadState(state.model, state.files, state.done + count, state.total)
            if time.monotonic() - self._emitted_at >= self._interval_s:
                self._emit_now()

    def end(self) -> None:
        """Pass the state on."""
        self._emit_now()

    def _emit_now(self) -> None:
        self._emitted_at = time.monotonic()
        self._emit(self._state)


class LogReport(PeriodicReport):
    """Writes the progress to the log, as a service does."""

    def __init__(self) -> None:
        """Use the log of this process."""
        super().__init__(_log_state)


def _log_state(state: DownloadState) -> None:
    get_logger("models").info(
        "model.download", model=state.model, stage=f"downloading {state.model}", files=state.files, done=state.done,
        total=state.total,
    )  # fmt: skip
