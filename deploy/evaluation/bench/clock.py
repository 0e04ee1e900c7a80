"""Clocks that are passed as arguments, so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Return the time in seconds, from an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; return at once if `seconds` is not positive."""
        ...


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
