"""The part of the scheduler's section that is about the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.section import Section


class CacheSettings(Section):
    """Who finds what, who may keep how much. Shares are of a tier's pages, spans are in epochs."""

    cache: Literal["user_aware", "isolated_pinned", "isolated", "shared", "chunk"] = "user_aware"
    """Prefix cache: what enough users of a tenant have computed themselves is shared in the tenant, and the rest is
    theirs; only what the operator pinned is shared; one per user; one for all (fast and leaky: for trusted users only);
    or none."""
    epoch_seconds: float = Field(default=10.0, gt=0)
    """Length of a cache epoch: windows of counters close, and prompts are shared, at its end."""
    cache_eviction: Literal["lru", "lfu", "slru", "priority"] = "lru"
    """What goes first: longest unused, fewest uses, used only once, or used by requests of low priority."""
    cache_promotion_subjects: int = Field(default=3, ge=1)
    """So many users of a tenant must have computed a prompt before the tenant shares it (k); k - 1 colluders and
    victims learn nothing."""
    cache_promotion_epochs: int = Field(default=30, ge=0)
    """Their computations must lie within so many epochs of each other: five minutes."""
    cache_share_across_tenants: bool = False
    """Make public what at least two tenants share, each by its own users, if both have chosen to share globally."""
    cache_repromotion_factor: int = Field(default=2, ge=1)
    """A prompt that was shared by mistake needs this many times the users to be shared again."""
    cache_content_check: bool = False
    """Share only what a content check has let pass. It runs in a process of its own; while that fails, nothing is
    shared."""
    content_detectors: tuple[str, ...] = ("patterns",)
    """Who checks: patterns (regular expressions), the name of an entry point in the group pando.content_detectors, or
    package.module:factory. Each can only say no."""
    content_rules: Path | None = None
    """TOML file with the patterns, read again when it changes; absent: those that ship with Pando."""
    content_deadline_s: float = Field(default=5.0, gt=0)
    """A check that takes longer is ended, which means no."""
    cache_verdict_epochs: int = Field(default=30, ge=1)
    """A content check that has not answered by then is asked again."""
    cache_remembered_chains: int = Field(default=65_536, ge=1)
    """Prompts whose verdict or demotion is remembered, at about 100 bytes each."""
    cache_hit_min: int = Field(default=16, ge=1)
    """Hits in a window below which it says nothing about probing."""
    cache_diversity_min: float = Field(default=0.125, ge=0, le=1)
    """Users per hit below which a window with few users looks like probing."""
    cache_jump_factor: int = Field(default=10, ge=1)
    """A prompt that lay quiet and has so many times its hits is suspect after one window, not two."""
    cache_few_creators: int = Field(default=6, ge=0)
    """That holds for prompts with up to so many creators: more are proof enough."""
    cache_continuation_limit: int = Field(default=256, ge=1)
    """So many different continuations tried by one user below one shared prompt in a window look like guessing."""
    cache_watched_pairs: int = Field(default=65_536, ge=1)
    """So many pairs of a user and a shared prompt are watched for that in a window and tenant, at up to 700 bytes
    each."""
    cache_demotion_quarantines: int = Field(default=2, ge=1)
    """So many users of a tenant who seem to probe a prompt take it from the tenant; its creators keep it."""
    cache_quarantine_epochs: int = Field(default=6, ge=0)
    """They are counted over so many epochs."""
    cache_demotion_tenants: int = Field(default=2, ge=2)
    """So many tenants that a public prompt was taken from, in as many epochs, show that it should not be public: each
    tenant that shared it before keeps it."""
    cache_creators_limit: int = Field(default=32, ge=1)
    """Creators kept per shared prompt and tenant; they keep it when it is demoted."""
    cache_quota_share: float = Field(default=0.25, gt=0, le=1)
    """A subject with more than this gives up its own pages first, so that a flood does not displace those of others.
    The limits file can say otherwise for tenants and subjects (cache_share), and limits tenants, too."""
    cache_floor_share: float = Field(default=1 / 1024, ge=0, le=1)
    """An active subject's pages up to this are the last that its tenant gives up; in the limits file, cache_floor."""
    cache_tenant_floor_share: float = Field(default=1 / 64, ge=0, le=1)
    """An active tenant's pages up to this are evicted only when all tenants have no more; in the limits file,
    cache_floor of a tenant."""
    cache_active_epochs: int = Field(default=30, ge=0)
    """A subject or tenant is active for so many epochs after its last request."""
    cache_headroom_share: float = Field(default=1 / 64, ge=0, lt=1)
    """Pages freed ahead of need, which can be found until they are reused."""
    cache_public_bonus_epochs: int = Field(default=6, ge=0)
    """Public prompts outlive private ones by so many epochs for each doubling of their users."""
    cache_strict_numerics: bool | Literal["auto"] = "auto"
    """Never exchange a user's private pages for equal ones that another user's batch computed: KV may differ in the
    last bits, and with it an answer. auto: true on GPUs, false on CPUs."""
    cache_merge_group_limit: int = Field(default=64, ge=2)
    """Users of one prefix whose pages are merged in one epoch; bounds the work at its boundary."""
    cache_host_gigabytes: float = Field(default=0.0, ge=0)
    """GiB of host memory, on each rank, for copies of KV pages that have left the device; 0: no host tier."""
    cache_host_pages: int | None = Field(default=None, ge=0)
    """The same in pages; goes before the former."""
    cache_host_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """What is copied to the host: all that is cached, what is used again, or what is about to leave the device."""
    cache_host_uses: int = Field(default=2, ge=1)
    """With write_through_selective: so many uses, the first of which computes it."""
    cache_host_window_pages: int = Field(default=256, ge=1)
    """Pages that may be on their way to the host at the same time; they cannot leave the device meanwhile."""
    cache_host_reserve_share: float = Field(default=1 / 16, gt=0, le=1)
    """With write_back: so much of the device is kept free or copied ahead of need."""
    cache_checked_paths: int = Field(default=8, ge=0)
    """Paths of the tree, of each kind, whose invariants are checked four times a second: about 0.1 % of a core."""
    cache_decision_log: Path | None = None
    """File to which every decision of the cache is appended, for `pando cache replay`. It holds all prompts as token
    ids, and who sent them: it is made readable for its owner alone, and grows without bound. Absent: none."""
