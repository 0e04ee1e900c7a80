"""Invariants of an eviction queue after every operation."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from services.scheduler.cache.eviction import EvictionQueue
    from services.scheduler.cache.eviction_policies import C
    from services.scheduler.cache.node import Holder


def queue_violations(queue: EvictionQueue[C], pages: Mapping[Holder, int], candidates: Set[C]) -> Iterator[str]:
    """Yield the faults of a queue that should count `pages` and hold exactly `candidates`. O(nodes)."""
    counted = queue.holders()
    expected = {holder: number for holder, number in pages.items() if number}
    if counted != expected:
        shown = [{holder.scope: number for holder, number in each.items()} for each in (expected, counted)]
        yield f"subjects and tenants have {shown[0]} pages, counted {shown[1]}"
    places = list(queue.places())
    if len(places) != len(candidates) or {candidate for _, candidate in places} != candidates:
        yield f"{len(candidates)} nodes can be evicted, and the eviction queue has {len(places)} entries"
        return
    first = queue.first()
    if first is not min(places, key=itemgetter(0), default=(None, None))[1]:
        yield f"the eviction queue takes one of {first and first.owner.scope} first, which is not the most urgent"
