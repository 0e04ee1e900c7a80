"""Time as an argument, so that tests can own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds of a monotonic clock, and waiting by it."""

    def now(self) -> float:
        """Return the time in seconds, from an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; at once if not positive."""
        ...


class SystemClock:
    """The real time."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(max(0.0, seconds))
