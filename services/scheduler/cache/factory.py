"""Makes the cache that the settings name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

from services.scheduler.cache.chunk import ChunkCache
from services.scheduler.cache.config import CacheConfig, EvictionPolicy, Mode
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy

if TYPE_CHECKING:
    from common.cache_settings import CacheSettings
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator

CacheName = Literal["user_aware", "isolated_pinned", "isolated", "shared", "chunk"]


def make_cache(
    name: CacheName,
    allocator: PageAllocator,
    page_size: int,
    config: CacheConfig | None = None,
    host: HostConfig | None = None,
) -> PrefixCache:
    """Return an empty cache over the pages of `allocator` and a host tier; `name` decides the mode of `config`."""
    if name == "chunk":
        return ChunkCache(page_size)
    return RadixCache(allocator, page_size, replace(config or CacheConfig(), mode=Mode(name)), host)


def resolve(settings: CacheSettings) -> CacheConfig:
    """Return what the settings say; the mode is left to `make_cache`.

    Raises:
        ConfigurationError: the settings contradict each other.
    """
    values = {
        field.name: getattr(settings, f"cache_{field.name}")
        for field in fields(CacheConfig)
        if field.name not in ("mode", "eviction")
    }
    return CacheConfig(eviction=EvictionPolicy(settings.cache_eviction), **values)


def resolve_host(settings: CacheSettings, pages: int) -> HostConfig:
    """Return the rules of a host tier for which the workers have `pages` pages.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    return HostConfig(
        pages=pages,
        policy=WritePolicy(settings.cache_host_policy),
        uses=settings.cache_host_uses,
        window_pages=settings.cache_host_window_pages,
        reserve_share=settings.cache_host_reserve_share,
    )
