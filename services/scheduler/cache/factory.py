"""Creates the configured cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from common.errors import ConfigurationError
from services.scheduler.cache.chunk import ChunkCache
from services.scheduler.cache.config import CacheConfig, EvictionPolicy, Mode, PrivacyProfile
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.cache.window_pages import WindowPages

if TYPE_CHECKING:
    from common.settings import CacheSettings, HostTierSettings
    from common.steps import EngineCapacity, WindowPool
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.sharing.choices import SharingChoices

CacheName = Literal["user_aware", "isolated_pinned", "isolated", "shared", "chunk"]


def make_allocator(name: CacheName, pages: int, page_size: int, window: WindowPool | None) -> PageAllocator:
    """Return an allocator of free pages for the cache `name`, with a second pool for sliding-window layers, if any.

    Raises:
        ConfigurationError: that pool is too small for a single row.
    """
    allocator = PageAllocator(pages)
    if window is None:
        return allocator
    allocator.windows = windows = WindowPages(
        window.pages, pages, page_size=page_size, window_tokens=window.window_tokens, keeps=name != "chunk"
    )
    least = min(windows.row_pages(page_size), pages)
    if window.pages < least:
        raise ConfigurationError(
            f"{window.pages} pages for the layers with a window of {window.window_tokens} tokens, but one row needs "
            f"{least}: free memory on the device, or raise scheduler.memory_fraction or lower scheduler.max_rows"
        )
    return allocator


def can_reuse(capacity: EngineCapacity) -> bool:
    """Whether cached prefixes are of use: an encoder keeps none, and recurrent layers continue from snapshots only."""
    states = capacity.recurrent_states
    return not capacity.is_encoder and (states is None or states.snapshots > 0)


def make_cache(
    name: CacheName,
    allocator: PageAllocator,
    page_size: int,
    config: CacheConfig | None = None,
    host: HostConfig | None = None,
    choices: SharingChoices | None = None,
) -> PrefixCache:
    """Return an empty cache over the pages of `allocator` and a host tier.

    `name` decides the mode of `config`. `choices` supplies the tenants' sharing choices; by default each shares within
    itself.
    """
    if name == "chunk":
        return ChunkCache(page_size)
    return RadixCache(allocator, page_size, replace(config or CacheConfig(), mode=Mode(name)), host, choices)


def with_snapshots(config: CacheConfig, capacity: EngineCapacity) -> CacheConfig:
    """Return the rules of a cache for workers with this memory for recurrent layers."""
    states = capacity.recurrent_states
    if states is None:
        return config
    return replace(config, snapshots=states.snapshots, snapshot_interval=capacity.pages_per_snapshot)


def resolve_cache(
    settings: CacheSettings, device: str = "cpu", *, content_check: bool = False, has_fleet: bool = False
) -> CacheConfig:
    """Convert the settings for workers on `device`; the mode is left to `make_cache`.

    Raises:
        ConfigurationError: the settings contradict each other.
    """
    return CacheConfig(
        profile=PrivacyProfile().for_evidence(settings.promotion_subjects),
        eviction=EvictionPolicy(settings.eviction),
        promotion_subjects=settings.promotion_subjects,
        promotion_epochs=settings.promotion_epochs,
        share_across_tenants=settings.share_across_tenants,
        content_check=content_check,
        has_fleet=has_fleet,
        quota_share=settings.quota_share,
        floor_share=min(CacheConfig().floor_share, settings.quota_share),
        strict_numerics=resolve_strict_numerics(settings.strict_numerics, device),
    )


def resolve_strict_numerics(wanted: bool | Literal["auto"], device: str) -> bool:
    """Return whether merging of equal pages of different owners is disabled; "auto" permits merging on CPUs only.

    On other devices KV may depend on the batch, so a user could notice that its pages were replaced.
    """
    return device.partition(":")[0] not in ("cpu", "fake") if wanted == "auto" else wanted


def resolve_host(settings: HostTierSettings, capacity: EngineCapacity) -> HostConfig:
    """Return the rules of a host tier in the memory that the workers have for it.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    states = capacity.recurrent_states
    return HostConfig(
        pages=capacity.host_pages,
        snapshots=states.host_snapshots if states is not None else 0,
        policy=WritePolicy(settings.write_policy),
    )
