"""The prefix cache's part of the scheduler's section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.section import Section


class CacheSettings(Section):
    """Rules of sharing and quotas in the prefix cache. Shares are of a tier's pages; durations are in epochs."""

    cache: Literal["user_aware", "isolated_pinned", "isolated", "shared", "chunk"] = "user_aware"
    """Prefix cache. user_aware: a prompt that enough users of a tenant have computed is shared within the tenant; other
    prompts stay private. isolated_pinned: only prompts that the operator pinned are shared. isolated: one cache per
    user. shared: one cache for all users, which reveals to each what others have sent: only for users who trust each
    other. chunk: no prefix cache."""
    epoch_seconds: float = Field(default=10.0, gt=0)
    """Length of a cache epoch in seconds. At its end, windows of counters close and prompts become shared."""
    cache_eviction: Literal["lru", "lfu", "slru", "priority"] = "lru"
    """Pages to evict first: least recently used (lru), least frequently used (lfu), used only once (slru), or used by
    requests of low priority (priority)."""
    cache_promotion_subjects: int = Field(default=3, ge=1)
    """Number k of users of a tenant that must have computed a prompt before it is shared within the tenant. A prompt
    is never shared while colluders and victims together are at most k - 1 users."""
    cache_promotion_epochs: int = Field(default=30, ge=0)
    """Epochs within which these users must have computed the prompt; the default is five minutes."""
    cache_share_across_tenants: bool = False
    """Make a prompt public once at least two tenants share it, each on the evidence of its own users, if these tenants
    have chosen global sharing."""
    cache_repromotion_factor: int = Field(default=2, ge=1)
    """Factor on cache_promotion_subjects for a prompt that was shared before and then demoted."""
    cache_content_check: bool = False
    """Share only prompts that a content check has approved. The check runs in a separate process; while that process
    fails, nothing new is shared."""
    content_detectors: tuple[str, ...] = ("patterns",)
    """Detectors of the content check: patterns (regular expressions), the name of an entry point in the group
    pando.content_detectors, or package.module:factory. A prompt is approved if none of them rejects it."""
    content_rules: Path | None = None
    """TOML file with the patterns, reloaded when it changes; absent: the patterns that ship with Pando."""
    content_deadline_s: float = Field(default=5.0, gt=0)
    """Time limit of a content check in seconds; a check that exceeds it is aborted and counts as a rejection."""
    cache_verdict_epochs: int = Field(default=30, ge=1)
    """Epochs after which a content check without a result is requested again."""
    cache_remembered_chains: int = Field(default=65_536, ge=1)
    """Prompts whose content verdict or demotion is remembered, at about 100 bytes each."""
    cache_hit_min: int = Field(default=16, ge=1)
    """Minimum of hits in a window for it to count as a sign of probing."""
    cache_diversity_min: float = Field(default=0.125, ge=0, le=1)
    """Ratio of distinct users to hits up to which a window with few users counts as a sign of probing."""
    cache_jump_factor: int = Field(default=10, ge=1)
    """If a rarely used prompt's hits grow by this factor, one suspicious window suffices instead of two in a row."""
    cache_few_creators: int = Field(default=6, ge=0)
    """The rule of cache_jump_factor applies to prompts with at most this many creators in the tenant."""
    cache_continuation_limit: int = Field(default=256, ge=1)
    """Different continuations of one shared prompt that make a user suspect of guessing if tried within one window."""
    cache_watched_pairs: int = Field(default=65_536, ge=1)
    """Pairs of a user and a shared prompt whose continuations are counted, per window and tenant, at up to 700 bytes
    each."""
    cache_demotion_quarantines: int = Field(default=2, ge=1)
    """Users of a tenant that must be suspected of probing a prompt before it is no longer shared with the tenant; its
    creators keep it."""
    cache_quarantine_epochs: int = Field(default=6, ge=0)
    """Epochs over which users and tenants suspected of probing are counted."""
    cache_demotion_tenants: int = Field(default=2, ge=2)
    """Tenants that must have lost a public prompt in this way, within cache_quarantine_epochs, before it is no longer
    public; tenants that shared it before keep it."""
    cache_creators_limit: int = Field(default=32, ge=1)
    """Creators recorded per shared prompt and tenant; they keep the prompt when it is demoted."""
    cache_quota_share: float = Field(default=0.25, gt=0, le=1)
    """Quota of a subject. Above it, its own pages are evicted first, so that a flood does not displace pages of others.
    In the limits file, cache_share sets quotas of single subjects and of tenants."""
    cache_floor_share: float = Field(default=1 / 1024, ge=0, le=1)
    """Pages of an active subject up to this share are the last that are evicted among its tenant's pages; in the limits
    file: cache_floor."""
    cache_tenant_floor_share: float = Field(default=1 / 64, ge=0, le=1)
    """Pages of an active tenant up to this share are evicted only when no tenant holds more than its floor; in the
    limits file: cache_floor of a tenant."""
    cache_active_epochs: int = Field(default=30, ge=0)
    """Epochs after its last request during which a subject or tenant counts as active."""
    cache_headroom_share: float = Field(default=1 / 64, ge=0, lt=1)
    """Share of the pages that evictions free in advance; prompts can still match these pages until they are reused."""
    cache_public_bonus_epochs: int = Field(default=6, ge=0)
    """Epochs by which public prompts outlive private ones in the cache, for each doubling of their users."""
    cache_strict_numerics: bool | Literal["auto"] = "auto"
    """Never replace a user's private pages by pages for the same tokens that another user's batch computed: their KV
    may differ in the last bits, which can change an answer. auto: true on GPUs, false on CPUs."""
    cache_merge_group_limit: int = Field(default=64, ge=2)
    """Users of one prefix whose pages are merged in one epoch; bounds the work at the epoch's end."""
    cache_host_gigabytes: float = Field(default=0.0, ge=0)
    """GiB of host memory per rank for copies of KV pages (the host tier); 0: no host tier."""
    cache_host_pages: int | None = Field(default=None, ge=0)
    """Size of the host tier in pages; takes precedence over cache_host_gigabytes."""
    cache_host_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """Pages that are copied to the host: all cached pages (write_through), those used repeatedly
    (write_through_selective), or those about to be evicted from the device (write_back)."""
    cache_host_uses: int = Field(default=2, ge=1)
    """With write_through_selective: uses after which a page is copied; its computation counts as the first."""
    cache_host_window_pages: int = Field(default=256, ge=1)
    """Pages that may be in transfer to the host at the same time; they cannot be evicted meanwhile."""
    cache_host_reserve_share: float = Field(default=1 / 16, gt=0, le=1)
    """With write_back: share of the device's pages that is kept free or copied in advance."""
    cache_checked_paths: int = Field(default=8, ge=0)
    """Paths of the tree, of each kind, whose invariants are checked four times a second, at about 0.1 % of a core."""
    cache_decision_log: Path | None = None
    """File to which all decisions of the cache are appended, for `pando cache replay`. It contains all prompts as token
    ids and the users who sent them: it is created readable only by its owner, and grows without bound. Absent: none."""
