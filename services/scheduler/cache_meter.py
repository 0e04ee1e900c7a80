"""Activity and cost of the cache, and traffic between the tiers, counted for the state dump and for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler import metrics
from services.scheduler.cache.types import CacheEventKind
from services.scheduler.core.cached_parts import cached_parts

if TYPE_CHECKING:
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.costs import OperationTimes
    from services.scheduler.core.load_back import LoadBack, Moved
    from services.scheduler.core.sequence import Sequence

STATES = ("free", "soft_free", "evictable", "protected")


class CacheMeter:
    """Owns the counts that the cache itself does not keep, and the state of all counts at their last export."""

    def __init__(self, times: OperationTimes) -> None:
        """Start with nothing exported; `times` are those of the cache's operations."""
        self.times = times
        # Matched prompt tokens, by tier and visibility.
        self.hit_tokens: dict[tuple[str, str], int] = {}
        self._events = dict.fromkeys(CacheEventKind, 0)
        self._calls: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def note_start(self, sequence: Sequence, lock: PrefixLock) -> None:
        """Count the tokens matched at a sequence's first start."""
        for tier, level, tokens in cached_parts(sequence, lock, lock.matched_tokens):
            self.hit_tokens[tier, level] = self.hit_tokens.get((tier, level), 0) + tokens
            metrics.CACHE_HIT_TOKENS_TOTAL.labels(tier, level).inc(tokens)

    def export(self, cache: PrefixCache) -> None:
        """Update the Prometheus metrics. O(1) in the size of the cache."""
        usage = cache.usage
        metrics.CACHE_NODES.set(usage.nodes)
        metrics.CACHE_VIEWS.set(usage.views)
        metrics.CACHE_EPOCH.set(cache.epoch)
        metrics.CACHE_PAGES.labels("public").set(usage.public_pages)
        metrics.CACHE_PAGES.labels("tenant").set(usage.tenant_pages)
        metrics.CACHE_PAGES.labels("private").set(usage.private_pages)
        metrics.CACHE_MERGED_PAGES.set(usage.merged_pages)
        for kind, exported in self._events.items():
            number = cache.events.count(kind)
            metrics.CACHE_EVENTS_TOTAL.labels(kind.value).inc(number - exported)
            self._events[kind] = number
        for name, cost in self.times:
            calls, seconds = cost.calls, max(cost.seconds, self._seconds.get(name, 0.0))
            metrics.CACHE_OPERATIONS_TOTAL.labels(name).inc(calls - self._calls.get(name, 0))
            metrics.CACHE_OPERATION_CPU_SECONDS_TOTAL.labels(name).inc(seconds - self._seconds.get(name, 0.0))
            self._calls[name], self._seconds[name] = calls, seconds
        if cache.host is not None:
            accounts = cache.host.account()
            for state in STATES:
                metrics.PAGES.labels("host", state).set(getattr(accounts, state))
            if cache.host.storage is not None:
                metrics.STORAGE_MISSES.set(cache.host.storage.misses)
                metrics.STORAGE_UNUSED_PAGES.set(cache.host.storage.unused_pages)


class TierMeter:
    """Exports one core's tier traffic to Prometheus as increments."""

    def __init__(self, bytes_per_page: int) -> None:
        """Start with nothing exported; a page has `bytes_per_page` bytes on each rank."""
        self._bytes_per_page = bytes_per_page
        self._exported: dict[str, Moved] = {}
        self._skipped_tokens = 0
        self._unread_tokens = 0

    def export(self, loads: LoadBack) -> None:
        """Update the Prometheus metrics."""
        for direction, moved in loads.moved.items():
            name = direction.value
            before = self._exported.get(name)
            pages = moved.pages - (before.pages if before else 0)
            metrics.TRANSFERS_TOTAL.labels(name).inc(moved.transfers - (before.transfers if before else 0))
            metrics.TRANSFER_BYTES_TOTAL.labels(name).inc(pages * self._bytes_per_page)
            metrics.TRANSFER_SECONDS_TOTAL.labels(name).inc(moved.seconds - (before.seconds if before else 0.0))
            self._exported[name] = moved
        metrics.TRANSFERS_OPEN.set(len(loads.host.ledger))
        metrics.LOAD_SKIPPED_TOKENS_TOTAL.inc(loads.skipped_tokens - self._skipped_tokens)
        self._skipped_tokens = loads.skipped_tokens
        metrics.STORAGE_SKIPPED_TOKENS_TOTAL.inc(loads.unread_tokens - self._unread_tokens)
        self._unread_tokens = loads.unread_tokens
