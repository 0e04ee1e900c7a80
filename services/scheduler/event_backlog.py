"""A bounded queue of the cache's events for one reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.types import CacheEvent

# Some tens of MB with their nodes.
MAX_QUEUED_EVENTS = 65_536


class EventBacklog:
    """Bounded queue of events for one watcher, as a watcher may stop reading and keep its stream open.

    If the queue overflows, all queued events are dropped and counted: a watcher that misses one change has a wrong
    picture of the tree. It receives the number of lost events and starts again from a snapshot.
    """

    def __init__(self, limit: int = MAX_QUEUED_EVENTS) -> None:
        self._events: deque[CacheEvent] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._lost = 0

    def add(self, event: CacheEvent) -> None:
        """Queue an event, or drop it together with all queued ones if the queue is full."""
        if self._lost or len(self._events) >= self._limit:
            self._lost += len(self._events) + 1
            self._events.clear()
        else:
            self._events.append(event)
        self._arrived.set()

    def take_lost(self) -> int:
        """Return the number of events lost since the last call, and start to queue events again."""
        lost, self._lost = self._lost, 0
        return lost

    async def next(self, timeout_s: float) -> CacheEvent | None:
        """Wait for the oldest event; None if events were lost, or if none arrives in time."""
        if not self._events and not self._lost:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        return self._events.popleft() if self._events else None

    def take(self) -> list[CacheEvent]:
        """Return all queued events, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events
