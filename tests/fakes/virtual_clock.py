"""Time that passes only when everybody waits."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

# Turns of the event loop after which everything that can run has run.
TURNS = 20


class VirtualClock:
    """A clock whose `run` jumps to the next sleeper whenever nothing else can go on."""

    def __init__(self) -> None:
        self.time = 100.0
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), waking))
        await waking

    async def run(self, work: Coroutine[object, object, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                due, _, waking = heapq.heappop(self._sleepers)
                self.time = max(self.time, due)  # a test may have moved it on
                waking.set_result(None)
        return task.result()
