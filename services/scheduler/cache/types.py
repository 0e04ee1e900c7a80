"""The values that cross the cache's boundary: scopes, ids, prefix locks, snapshots of nodes and owners, events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

from common.types import Subject, View

if TYPE_CHECKING:
    from common.steps import PageIds
    from common.types import TokenIds

LockId = NewType("LockId", int)
NodeId = NewType("NodeId", int)
CandidateId = NewType("CandidateId", int)
# Where a node is visible: () everywhere, (tenant,) in a tenant's views, (tenant, subject, salt) in one view.
Scope = tuple[str, ...]
# (tenant, name) of a subject.
SubjectKey = tuple[str, ...]
PUBLIC_SCOPE: Scope = ()
# Parts of the scope of a view.
VIEW_PARTS = 3


def scope_of(view: View) -> Scope:
    """Return the scope of a view's own nodes."""
    return view.subject.tenant, view.subject.name, view.salt


def view_of(scope: Scope) -> View:
    """Return the view whose own nodes have this scope."""
    tenant, subject, salt = scope
    return View(Subject(tenant, subject), salt)


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """A row's lock on its path in the cache: no node of the path is evicted until the lock is released.

    Opaque: the cache knows by `lock_id` where it points and may move it (`pages` is what it covered when made).
    `pages` is [matched_tokens / page_size] int32, read-only.
    """

    lock_id: LockId
    view: View
    matched_tokens: int
    pages: PageIds
    # Of these, what every view has, and then what the tenant's views have.
    public_tokens: int = 0
    tenant_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insert did.

    `lock` replaces the one passed in. `pages` is the row's page table prefix as the cache knows it: canonical pages
    where the cache had them already. `duplicates` are the caller's pages that `pages` does not use, each reported
    once, in the insert that finds it; the row's table differs from `pages` from index `first_duplicate` on. The cache
    has changed no reference of the row's. A row that goes on has to be repointed, and then
    `PageAllocator.exchange(duplicates, canonical)` passes its references on; one that ends with this insert may keep
    its own pages. `canonical` are the pages that stand in for `duplicates`, in the same order.
    """

    lock: PrefixLock
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
    locks: int
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


@dataclass(frozen=True, slots=True)
class PromotionCandidate:
    """A chain with enough evidence, from its first token on, [tokens] int32.

    `tenant` is the one whose subjects are to share it, or empty for the public.
    """

    candidate_id: CandidateId
    token_ids: TokenIds
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Accounting:
    """One tier at one moment, in pages; free + soft_free + evictable + protected = capacity.

    `protected` pages are named by running rows or locked nodes. `unaccounted_references` is how many references the
    allocator counts beyond those of the rows and the cache: above 0 pages leak, below 0 a page may be freed in use.
    """

    capacity: int
    free: int
    soft_free: int
    evictable: int
    protected: int
    unaccounted_references: int

    @property
    def is_exact(self) -> bool:
        """Whether every reference has a holder and no pages are locked that are not in use."""
        return self.unaccounted_references == 0 and self.protected >= 0
