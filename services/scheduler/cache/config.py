"""All constants of the cache, with their defaults and reasons. `CacheSettings` sets some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from common.errors import ConfigurationError

# Distinct subjects are counted exactly up to this number, then estimated; thresholds below it are exact.
EXACT_SUBJECTS = 64
# At least this many tenants must agree to make a node public or to demote it: a single one could invent subjects.
MIN_TENANTS = 2


class Mode(Enum):
    """Sharing rules: the baselines and the user-aware cache are one tree under different rules.

    SHARED: one view for all; fast, but reveals to each user what others asked. ISOLATED: each view has its own
    prefixes. ISOLATED_PINNED: isolated, but prompts pinned by the operator are public. USER_AWARE: pins, and prefixes
    that enough subjects of a tenant have computed themselves become the tenant's.
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
    """Order of eviction among one owner's nodes, and among owners within their shares.

    Every policy evicts nodes without a pin first, and among them those whose requests had the lowest priority. After
    these two:

    LRU: earliest epoch, then least recently used; nodes that many subjects used in the previous epoch count as used
    some epochs later (`public_bonus_epochs`). LFU: fewest uses (by powers of two), then least recently used. SLRU:
    nodes used once before nodes used again, each as in LRU. PRIORITY: as in LRU; only under this policy do nodes have
    the priorities of their requests, otherwise all are 0.
    """

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    PRIORITY = "priority"


def _check(checks: dict[str, bool]) -> None:
    wrong = [message for message, is_met in checks.items() if not is_met]
    if wrong:
        raise ConfigurationError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class PrivacyProfile:
    """Constants of the bounds B2, B3 and B5 of docs/privacy.md, which hold for them together.

    They decide when text is shared again after a demotion, when hits count as probing, and what a quarantine and a
    demotion require. They are chosen with regard to each other and are no settings; tests change them. Two depend on
    the evidence that a promotion requires: `few_creators` and `creators_limit` are minimums, see `for_evidence`.
    """

    # --- promotion ---
    # Factor on the required evidence after a demotion, which proved the evidence too weak once.
    repromotion_factor: int = 2
    # A verdict that does not arrive within this number of epochs is requested again: the check has lost it.
    verdict_epochs: int = 30
    # Number of chains whose verdict or demotion is remembered; at 100 bytes each this is some MB.
    remembered_chains: int = 65_536

    # --- probe detection ---
    # Fewer hits in a window are not judged: they cannot distinguish a person from a prober.
    hit_min: int = 16
    # Distinct subjects per hit below which a window looks like probing: 2 subjects with 16 hits.
    diversity_min: float = 0.125
    # A quiet node whose hits grow by this factor is judged after one window instead of two.
    jump_factor: int = 10
    # "Shared by few" means at most this many creators: twice the required evidence, with that of 3 subjects as the
    # minimum. Below the required evidence, no node would be shared by few.
    few_creators: int = 6
    # Distinct continuations that one subject may try below a node within a window; an ordinary application tries fewer.
    continuation_limit: int = 256
    # Pairs of subject and node of one tenant for which these are counted in a window, so that invented subjects cannot
    # fill memory. Also the maximum number of creators of a PUBLIC node.
    watched_pairs: int = 65_536

    # --- demotion ---
    # Number of a tenant's subjects quarantined at one node within the window below after which the tenant loses the
    # node: many of them probe it.
    demotion_quarantines: int = 2
    quarantine_epochs: int = 6
    # Number of tenants quarantined at a PUBLIC node within that window after which it is demoted: more than one, as a
    # tenant's users may be invented by a rival.
    demotion_tenants: int = 2
    # Creators kept per node and tenant: they bound the copies made by a demotion; early ones are the evidence.
    creators_limit: int = 32

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        _check(
            {
                "demotion_tenants must be at least 2": self.demotion_tenants >= MIN_TENANTS,
                "repromotion_factor must be at least 1": self.repromotion_factor >= 1,
                "diversity_min must be in [0, 1]": 0 <= self.diversity_min <= 1,
            }
        )

    def for_evidence(self, promotion_subjects: int) -> PrivacyProfile:
        """Return these constants for that number of subjects: those that depend on it grow with it."""
        return replace(
            self,
            few_creators=max(self.few_creators, 2 * promotion_subjects),
            creators_limit=max(self.creators_limit, self.repromotion_factor * promotion_subjects),
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Rules of a radix cache. Shares are of the tier's capacity; windows and spans are counted in epochs."""

    mode: Mode = Mode.USER_AWARE
    eviction: EvictionPolicy = EvictionPolicy.LRU
    profile: PrivacyProfile = PrivacyProfile()

    # --- promotion ---
    # Subjects of a tenant that must have computed a chain: with k, k - 1 colluders and victims learn nothing.
    promotion_subjects: int = 3
    # Epochs within which they must have computed it: 5 minutes of 10 s epochs are many turns of a popular prompt.
    promotion_epochs: int = 30
    # Whether prefixes that several tenants share, each by its own evidence and choice, become public.
    share_across_tenants: bool = False
    # Promote only prefixes that the content check has allowed.
    content_check: bool = False

    # Whether evidence is counted together with other scheduler groups.
    has_fleet: bool = False

    # --- memory ---
    # The next three apply where the limits file states nothing else.
    # A subject above it evicts its own cold pages first: four heavy users cannot displace all others.
    quota_share: float = 0.25
    # Up to it, an active subject's pages are evicted last of its tenant's: 1/1024 of 100,000 pages are 1,500 tokens.
    floor_share: float = 1 / 1024
    # Up to it, an active tenant's pages are evicted only when no tenant has more: its subjects' floors together.
    tenant_floor_share: float = 1 / 64
    # Time for which a subject or tenant counts as active after its last request: the same 5 minutes as for evidence.
    active_epochs: int = 30
    # Pages that an eviction frees in advance, so that they may still be revived: about one long prompt.
    headroom_share: float = 1 / 64
    # Epochs that a public node outlives a private one, for each doubling of its subjects in a window.
    public_bonus_epochs: int = 6

    # --- recurrent layers ---
    # Slots for snapshots of their states; 0: the model has no such layers. And the distance of regular snapshots.
    snapshots: int = 0
    snapshot_interval: int = 1

    # --- merging ---
    # Never replace a private page by one computed in another batch: its KV may differ in the last bits.
    strict_numerics: bool = False
    # Owners of one prefix among which pages are merged in an epoch: bounds the work at its boundary.
    merge_group_limit: int = 64

    def required_subjects(self, generation: int) -> int:
        """Return the number of subjects that text must have been computed by, after `generation` demotions."""
        return self.promotion_subjects * (self.profile.repromotion_factor if generation else 1)

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        highest = self.promotion_subjects * self.profile.repromotion_factor
        _check(
            {
                "promotion_subjects must be at least 1": self.promotion_subjects >= 1,
                f"promotion_subjects × repromotion_factor must be at most {EXACT_SUBJECTS}": highest <= EXACT_SUBJECTS,
                "quota_share must be in (0, 1]": 0 < self.quota_share <= 1,
                "floor_share must be in [0, quota_share]": 0 <= self.floor_share <= self.quota_share,
                "tenant_floor_share must be in [0, 1]": 0 <= self.tenant_floor_share <= 1,
                "headroom_share must be in [0, 1)": 0 <= self.headroom_share < 1,
                "creators_limit must hold the evidence of a promotion": self.profile.creators_limit >= highest,
                "merge_group_limit must be at least 2": self.merge_group_limit >= 2,
            }
        )
