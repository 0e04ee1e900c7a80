"""The tokens that a sequence found in the cache, by tier and by level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.deltas import CACHE_LEVELS, CACHE_TIERS, CachedPart

if TYPE_CHECKING:
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.sequence import Sequence


def cached_parts(sequence: Sequence, lock: PrefixLock, limit: int) -> tuple[CachedPart, ...]:
    """Return the parts of the first `limit` tokens that `lock` matched; together they have as many tokens.

    On every path public tokens come first, then the tenant's; loaded tokens come last, those from storage at the end.
    """
    loaded = min(sequence.host_tokens, lock.matched_tokens)
    stored = min(sequence.storage_tokens, loaded)
    matched = lock.matched_tokens
    tier_ends = (matched - loaded, matched - stored, matched)
    level_ends = (lock.public_tokens, lock.public_tokens + lock.tenant_tokens, matched)
    parts, tier_start = [], 0
    for tier, tier_end in zip(CACHE_TIERS, tier_ends, strict=True):
        level_start = 0
        for level, level_end in zip(CACHE_LEVELS, level_ends, strict=True):
            tokens = min(tier_end, level_end, limit) - max(tier_start, level_start)
            if tokens > 0:
                parts.append(CachedPart(tier, level, tokens))
            level_start = level_end
        tier_start = tier_end
    return tuple(parts)
