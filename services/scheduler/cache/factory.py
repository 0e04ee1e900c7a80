"""Makes the cache that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from services.scheduler.cache.chunk import ChunkCache
from services.scheduler.cache.radix import RadixCache

if TYPE_CHECKING:
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator

CacheName = Literal["isolated", "shared", "chunk"]


def make_cache(name: CacheName, allocator: PageAllocator, page_size: int) -> PrefixCache:
    """Return an empty cache over the pages of `allocator`; `SchedulerSettings.cache` tells the names."""
    match name:
        case "isolated":
            return RadixCache(allocator, page_size)
        case "shared":
            return RadixCache(allocator, page_size, shared=True)
        case "chunk":
            return ChunkCache(page_size)
        case _:
            assert_never(name)
