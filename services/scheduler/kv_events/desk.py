"""Publishes the cache's changes."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.defects import begin_again
from services.scheduler.event_backlog import EventBacklog
from services.scheduler.kv_events.blocks import BlockIndex, UnknownParentError
from services.scheduler.kv_events.messages import AllBlocksCleared, KVEventBatch, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.fleet.names import FleetKeys
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.types import NodeSnapshot
    from services.scheduler.kv_events.messages import BlockRemoved, BlockStored
    from services.scheduler.kv_events.publisher import KVEventPublisher

# Changes within this time go out together.
INTERVAL_S = 0.05


class KVEventDesk:
    """Follows the current cache.

    Each cache begins with AllBlocksCleared, and so does a new description of the same cache after events were lost.
    """

    def __init__(
        self, publisher: KVEventPublisher, keys: FleetKeys, page_size: int, cache: Callable[[], PrefixCache | None]
    ) -> None:
        """`cache` returns the current cache; None while there is none."""
        self._publisher = publisher
        self._keys = keys
        self._page_size = page_size
        self._find_cache = cache
        self._log = get_logger("kv_events")

    async def run(self) -> None:
        """Publish until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(begin_again("kv events", self._publisher.serve_replays))
                while True:
                    cache = self._find_cache()
                    if cache is None:
                        await asyncio.sleep(INTERVAL_S)
                    else:
                        await begin_again("kv events", partial(self._follow, cache))
        finally:
            self._publisher.close()

    async def _follow(self, cache: PrefixCache) -> None:
        """Publish a cache's blocks, then its changes, until it is replaced or events were lost."""
        index = BlockIndex(self._keys.block, self._page_size)
        backlog = EventBacklog()
        unsubscribe = cache.events.subscribe(backlog.add)
        try:
            await self._publisher.send(encode(KVEventBatch(time.time(), [AllBlocksCleared()])))
            await self._publish(index, list(cache.dump()))
            while self._find_cache() is cache:
                await asyncio.sleep(INTERVAL_S)
                await self._publish(index, [event.node for event in backlog.take() if event.node is not None])
                if lost := backlog.take_lost():
                    metrics.CACHE_EVENTS_LOST_TOTAL.inc(lost)
                    self._log.warning("kv_events.lost", events=lost)
                    return
        except UnknownParentError:
            self._log.warning("kv_events.out_of_step")
        finally:
            unsubscribe()

    async def _publish(self, index: BlockIndex, nodes: Sequence[NodeSnapshot]) -> None:
        """Publish the nodes' blocks; hashing takes some µs per block, and runs beside the event loop."""
        if not nodes:
            return
        payload = await asyncio.to_thread(_describe, index, nodes)
        if payload is not None:
            await self._publisher.send(payload)


def _describe(index: BlockIndex, nodes: Sequence[NodeSnapshot]) -> bytes | None:
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for node in nodes:
        events.extend(index.apply(node))
    return encode(KVEventBatch(time.time(), events)) if events else None
