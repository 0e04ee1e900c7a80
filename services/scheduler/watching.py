"""Events on their way to one watcher."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.types import CacheEvent

# Events that may wait for a slow watcher: some tens of MB with the nodes they show.
MAX_QUEUED_EVENTS = 65_536


class EventBacklog:
    """Events that wait for one watcher; bounded, as a watcher may stop reading and keep its stream open.

    What does not fit is counted, and makes all that waits worthless: a watcher that lacks one change has a wrong
    picture of the tree. It is told how many it lost and begins again with a snapshot.
    """

    def __init__(self, limit: int = MAX_QUEUED_EVENTS) -> None:
        """Start empty."""
        self._events: deque[CacheEvent] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._lost = 0

    def add(self, event: CacheEvent) -> None:
        """Keep an event, or count it as lost with all that wait."""
        if self._lost or len(self._events) >= self._limit:
            self._lost += len(self._events) + 1
            self._events.clear()
        else:
            self._events.append(event)
        self._arrived.set()

    def take_lost(self) -> int:
        """Return how many events were lost since the last call; from now on events are kept again."""
        lost, self._lost = self._lost, 0
        return lost

    async def next(self, timeout_s: float) -> CacheEvent | None:
        """Wait for the oldest event; None when some were lost, or when there is none in time."""
        if not self._events and not self._lost:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        return self._events.popleft() if self._events else None
