"""What the scheduler asks of a prefix cache; every cache of this folder keeps to it.

References: the page allocator counts one reference per page and holder. A running row holds one for every page in its
page table: `PageAllocator.try_allocate` hands it out for new pages, `PrefixCache.commit` for matched ones, and
`PageAllocator.release` takes it back. The cache holds its own, one per page and node. So nothing that a row still
names can become free, whatever happens to the cache; README.md tells the whole protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.reviews import CandidateId, PromotionCandidate
    from services.scheduler.cache.tiers.host_tier import HostTier

LeaseId = NewType("LeaseId", int)
NodeId = NewType("NodeId", int)


@dataclass(frozen=True, slots=True)
class Lease:
    """A row's hold on its path in the cache: no node of it is evicted until the lease is released.

    Opaque: the cache knows by `lease_id` where it points and may move it (`pages` is what it covered when made).
    `pages` is [matched_tokens / page_size] int32, read-only.
    """

    lease_id: LeaseId
    view: View
    matched_tokens: int
    pages: PageIds
    # Of these, what every view has, and then what the tenant's views have.
    public_tokens: int = 0
    tenant_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insert did.

    `lease` replaces the one passed in. `pages` is the row's page table prefix as the cache knows it: canonical pages
    where the cache had them already. `duplicates` are the caller's pages that `pages` does not use, each reported
    once, in the insert that finds it; the row's table differs from `pages` from index `first_duplicate` on. The cache
    has changed no reference of the row's. A row that goes on has to be repointed, and then
    `PageAllocator.exchange(duplicates, canonical)` passes its references on; one that ends with this insert may keep
    its own pages. `canonical` are the pages that stand in for `duplicates`, in the same order.
    """

    lease: Lease
    pages: PageIds
    duplicates: PageIds
    canonical: PageIds
    first_duplicate: int | None = None


class NodeState(Enum):
    """Whether a node counts as held. SOFT_FREE: its pages count as free, but until they are reused it can be found.

    ON_HOST: it has no pages on the device any more, only the copy on the host, and so has all that hangs below it.
    """

    LIVE = "live"
    SOFT_FREE = "soft_free"
    ON_HOST = "on_host"


class Visibility(Enum):
    """Whose views a node is in: one view, those of a tenant, or all."""

    PRIVATE = "private"
    TENANT = "tenant"
    PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node as it is at one moment; `TreeNode` in protos/pando/v1/scheduler.proto explains each field.

    `parent_id` is None for children of the root. `owner` is set for PRIVATE nodes, `tenant` for TENANT ones. `pages` is
    [edge_tokens / page_size] int32 and `token_ids` [edge_tokens] int32, both read-only. Hits and users of the current
    and the last epoch are those of subjects that are not among the `creators`. `quarantined` subjects and
    `quarantined_tenants` do not see the node. `promoted_tenants` shared a PUBLIC node before it was PUBLIC.
    """

    node_id: NodeId
    parent_id: NodeId | None
    edge_tokens: int
    depth_tokens: int
    visibility: Visibility
    owner: View | None
    tenant: str | None
    lock_ref: int
    last_access: int
    pages: PageIds
    token_ids: TokenIds
    state: NodeState = NodeState.LIVE
    hits: int = 0
    users: int = 0
    previous_hits: int = 0
    previous_users: int = 0
    epoch: int = 0
    creators: int = 0
    quarantined: int = 0
    quarantined_tenants: int = 0
    generation: int = 0
    priority: int = 0
    pinned: bool = False
    no_promote: bool = False
    promoted_by: int | None = None
    promoted_epoch: int | None = None
    promoted_tenants: int = 0
    host_pages: PageIds | None = None
    host_ref: int = 0


@dataclass(frozen=True, slots=True)
class OwnerSnapshot:
    """What a view has in the cache, a tenant, or without either the public; pages as if nobody else held them."""

    view: View | None
    tenant: str | None
    device_pages: int
    host_pages: int
    nodes: int
    leases: int
    last_epoch: int
    is_active: bool


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """The cache's totals. A device page counts for each node that names it.

    `public_pages` and `tenant_pages` are those of LIVE nodes, `private_pages` all others, so the soft-free, too.
    """

    nodes: int
    views: int
    public_pages: int
    tenant_pages: int
    private_pages: int
    # How many more pages were needed if no two nodes named the same one.
    merged_pages: int


class CacheEventKind(Enum):
    """What happened to a node; the event shows it as it is afterwards, with `edge_tokens` 0 when nothing is left.

    INSERTED: it is new, or its edge grew at the end. SPLIT: its edge was cut in two; one event for the new upper
    half, then one for the lower half, which keeps the id. SOFT_FREED: it counts as free and can still be found.
    REVIVED: it counts no longer as free. RECLAIMED: it was soft-free and lost pages at its end, or it lost its copy on
    one tier. BACKED_UP: it has got a copy on the host. LOADED: it was ON_HOST and is LIVE again. EVICTED: it was
    dropped without having been soft-free, as somebody is forgotten or others hold the same. FLUSHED: has no node; the
    events of all that went stand before it. PROMOTED: it is TENANT or PUBLIC now. DEMOTED: it was one of these and is
    gone; copies for its creators, or for the tenants that shared it before, were INSERTED before. QUARANTINED: some
    subjects, or all of a tenant, do not see it any more. MERGED: it names other
    pages with the same content, took in its parent, or hangs below another parent with the same tokens.
    """

    INSERTED = "inserted"
    SPLIT = "split"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    PROMOTED = "promoted"
    DEMOTED = "demoted"
    QUARANTINED = "quarantined"
    SOFT_FREED = "soft_freed"
    REVIVED = "revived"
    RECLAIMED = "reclaimed"
    MERGED = "merged"
    BACKED_UP = "backed_up"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the tree. `sequence` rises by one per event, also while nobody listens."""

    sequence: int
    kind: CacheEventKind
    node: NodeSnapshot | None


class EventSource(Protocol):
    """Tells listeners of every change, in order, from within the operation that makes it."""

    @property
    def sequence(self) -> int:
        """Number of the latest event; a dump taken now reflects it."""

    def count(self, kind: CacheEventKind) -> int:
        """Return how many events of a kind there have been."""

    def subscribe(self, listener: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on, until the returned function is called."""


class PrefixCache(Protocol):
    """Finds, keeps and gives up KV pages by the tokens they hold, in each view.

    Matching is by whole pages, and never covers a prompt wholly, as its last token must be computed. Nothing here
    reads a clock or chance: the same calls in the same order give the same tree.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def events(self) -> EventSource:
        """Where changes of the tree are told."""

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if there is one."""

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could make free now, soft-free ones aside. O(1)."""

    @property
    def protected_pages(self) -> int:
        """Device pages in nodes that a lease holds. O(1)."""

    @property
    def soft_free_pages(self) -> int:
        """Device pages that count as free but still hold content which a commit may revive. O(1)."""

    @property
    def held_references(self) -> int:
        """Page references the cache holds, one per page and node. O(1)."""

    def view_of(self, view: View) -> Hashable | None:
        """Return what is equal for requests that find all of each other's prefixes; None: nothing is found."""

    def peek(self, view: View, token_ids: TokenIds) -> int:
        """Return how many leading tokens a view covers; pure.

        A multiple of the page size, and at most len(token_ids) - 1.
        """

    def commit(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        repeated: bool = False,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> Lease:
        """Match, lock and touch the longest prefix in a view; once, when a row is admitted.

        The row gets a reference on each of the lease's pages and gives them back with the rest of its table.

        Args:
            view: What the request may find, and whose evidence it is.
            token_ids: [tokens] int32, the row's known ids.
            repeated: A further commit of one request (after a retraction, or another of its choices): no new hit.
            may_promote: Whether what is inserted through the lease may be evidence that lets others find it.
            priority: The request's priority, where the order of eviction looks at it.
            session: The conversation that the request belongs to, where its user may want it forgotten.
        """

    def commit_nothing(self, view: View) -> Lease:
        """Return a lease for a row that may neither read the cache nor add to it; `insert` through it keeps nothing."""

    def insert(self, lease: Lease, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Add the whole pages of `token_ids` below the lease, which it replaces by one that covers them.

        Args:
            lease: The row's current lease.
            token_ids: [tokens] int32, the row's ids whose KV is computed or planned, from its first on.
            pages: [at least tokens // page_size] int32, the row's page table.
            prompt_tokens: How many of the row's ids are its prompt; generated ones are no evidence of publicness.
        """

    def release(self, lease: Lease) -> None:
        """Unlock the lease's path. The row's page references are the row's to release."""

    def evict(self, pages: int) -> int:
        """Free at least so many pages of unlocked nodes, or all there are; return how many became free."""

    def flush(self) -> int:
        """Drop everything that no lease holds; return how many pages became free."""

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Drop all that is private to a subject, in all of its views, also while its rows run; return the pages freed.

        Its rows go on, and nothing more of them is kept. With `session`, that goes which no other session and no
        request without one has used.
        """

    @property
    def epoch(self) -> int:
        """The epoch that the last `advance` began."""

    def advance(self, epoch: int) -> None:
        """Begin a later epoch: promote, demote, merge. Off the critical path, as it may take milliseconds."""

    def adopt(self, limits: Limits) -> None:
        """Apply other quotas and floors from now on."""

    def pin(self, token_ids: TokenIds) -> int:
        """Make a prompt's whole pages public from the next epoch on; return how many tokens that are."""

    def unpin(self, token_ids: TokenIds) -> bool:
        """Undo `pin`; return whether there was such a pin."""

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        """Return the chains that await a content check, once."""

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Take the verdict on a candidate: how many of its leading tokens may become public."""

    def forget_verdicts(self) -> None:
        """Forget the content check's verdicts, as its rules have changed; what is public stays so."""

    @property
    def usage(self) -> CacheUsage:
        """Totals of the tree. O(tenants)."""

    def owners(self) -> Iterator[OwnerSnapshot]:
        """Yield the public, the tenants and each view with a node or a lease; consume it before the cache changes."""

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        """Yield the nodes in one view, or all nodes: parents before children.

        To be consumed before the cache changes.
        """
