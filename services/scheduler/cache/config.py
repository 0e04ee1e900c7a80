"""Every constant of the cache, with its default and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import ConfigurationError

# Distinct subjects are counted exactly up to here, then estimated; thresholds below it are exact.
EXACT_SUBJECTS = 64
# Only so many tenants together make anything public, or take it from the public: one alone could be inventing.
MIN_TENANTS = 2


class Mode(Enum):
    """Who finds what: the baselines and the user-aware cache are one tree under different rules.

    SHARED: one view for all; fast, and tells each user what others asked. ISOLATED: each view finds its own.
    ISOLATED_PINNED: isolated, but prompts that the operator pinned are public. USER_AWARE: pins, and what enough
    subjects of a tenant have computed themselves becomes the tenant's.
    """

    SHARED = "shared"
    ISOLATED = "isolated"
    ISOLATED_PINNED = "isolated_pinned"
    USER_AWARE = "user_aware"

    @property
    def allows_pins(self) -> bool:
        """Whether the operator's pins have an effect."""
        return self in (Mode.ISOLATED_PINNED, Mode.USER_AWARE)


class EvictionPolicy(Enum):
    """What goes first within one owner's nodes, and among owners within their shares.

    LRU: oldest epoch, then least recently used. LFU: fewest uses (by powers of two), then LRU. SLRU: what was used
    once before what was used again, each by LRU. PRIORITY: lowest priority of the requests that used it, then LRU.
    """

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Rules of a radix cache. Shares are of the tier's capacity; windows and spans are counted in epochs."""

    mode: Mode = Mode.USER_AWARE
    eviction: EvictionPolicy = EvictionPolicy.LRU

    # --- promotion ---
    # So many subjects of a tenant must have computed a chain: with k, k - 1 colluders and victims learn nothing.
    promotion_subjects: int = 3
    # Their computations must lie so close together: 5 minutes of 10 s epochs are many turns of a popular prompt.
    promotion_epochs: int = 30
    # Whether what several tenants share, each by its own evidence and by its choice, becomes public.
    share_across_tenants: bool = False
    # After a demotion the evidence was proven too weak once: ask for so many times more.
    repromotion_factor: int = 2
    # Promote only what a content check has let pass.
    content_check: bool = False
    # A verdict that does not come within so many epochs is asked for again: the check has lost it.
    verdict_epochs: int = 30
    # Chains whose verdict or demotion is remembered; at 100 bytes each this is some MB.
    remembered_chains: int = 65_536

    # --- demotion ---
    # Fewer hits in a window say nothing: a person cannot be told from a prober by them.
    hit_min: int = 16
    # Distinct subjects per hit below which a window looks like probing: 2 subjects with 16 hits.
    diversity_min: float = 0.125
    # A node that lay quiet and suddenly has so many times its hits is looked at after one window, not two.
    jump_factor: int = 10
    # "Shared by few" means up to so many creators: twice the evidence asked for.
    few_creators: int = 6
    # Distinct continuations that one subject may try below a node within a window: a person's app asks less.
    continuation_limit: int = 256
    # Pairs of subject and node, of one tenant, for which these are counted in a window; invented subjects must not fill
    # memory. Also the creators kept of a PUBLIC node in all.
    watched_pairs: int = 65_536
    # So many of a tenant's subjects quarantined at one node within the window below show that many probe it: the tenant
    # should not have seen it.
    demotion_quarantines: int = 2
    quarantine_epochs: int = 6
    # So many tenants that have been quarantined at a PUBLIC node within that window show that it should not be PUBLIC:
    # more than one, as a tenant's users may be the inventions of a rival.
    demotion_tenants: int = 2
    # Creators kept per node and tenant: they bound what a demotion copies; early ones are the evidence.
    creators_limit: int = 32

    # --- memory ---
    # These three hold where the limits file says nothing else.
    # A subject above it evicts its own cold pages first: four heavy users cannot push out everybody else.
    quota_share: float = 0.25
    # Up to it, an active subject's pages go last of its tenant's: 1/1024 of 100,000 pages are 1,500 tokens.
    floor_share: float = 1 / 1024
    # Up to it, an active tenant's pages go only when all tenants have no more: its subjects' floors together.
    tenant_floor_share: float = 1 / 64
    # A subject or tenant counts as active so long after its last request: the same 5 minutes as evidence.
    active_epochs: int = 30
    # Pages that an eviction frees ahead of need, so that they may still be revived: about one long prompt.
    headroom_share: float = 1 / 64
    # Epochs that a public node outlives a private one, for each doubling of its subjects in a window.
    public_bonus_epochs: int = 6

    # --- merging ---
    # Never exchange a private page for one that another batch computed: KV may differ in the last bits.
    strict_numerics: bool = False
    # Owners of one prefix among whom pages are merged in an epoch: bounds the work at its boundary.
    merge_group_limit: int = 64

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        highest = self.promotion_subjects * self.repromotion_factor
        checks = {
            "promotion_subjects must be at least 1": self.promotion_subjects >= 1,
            "demotion_tenants must be at least 2": self.demotion_tenants >= MIN_TENANTS,
            f"promotion_subjects × repromotion_factor must be at most {EXACT_SUBJECTS}": (highest <= EXACT_SUBJECTS),
            "repromotion_factor must be at least 1": self.repromotion_factor >= 1,
            "quota_share must be in (0, 1]": 0 < self.quota_share <= 1,
            "floor_share must be in [0, quota_share]": 0 <= self.floor_share <= self.quota_share,
            "tenant_floor_share must be in [0, 1]": 0 <= self.tenant_floor_share <= 1,
            "headroom_share must be in [0, 1)": 0 <= self.headroom_share < 1,
            "diversity_min must be in [0, 1]": 0 <= self.diversity_min <= 1,
            "creators_limit must hold the evidence of a promotion": self.creators_limit >= highest,
            "merge_group_limit must be at least 2": self.merge_group_limit >= 2,
        }
        wrong = [message for message, paths in checks.items() if not paths]
        if wrong:
            raise ConfigurationError("; ".join(wrong))
