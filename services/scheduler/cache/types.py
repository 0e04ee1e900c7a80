"""Value types of the cache's interface: scopes, ids, prefix locks, snapshots of nodes and owners, events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

from common.types import SnapshotSlot, Subject, View
from services.scheduler.cache.keys import text_ids

if TYPE_CHECKING:
    from common.steps import PageIds
    from common.types import TokenIds

LockId = NewType("LockId", int)
NodeId = NewType("NodeId", int)
CandidateId = NewType("CandidateId", int)
# Visibility of a node: () everywhere, (tenant,) in a tenant's views, (tenant, subject, salt) in one view.
Scope = tuple[str, ...]
# (tenant, name) of a subject.
SubjectKey = tuple[str, ...]
PUBLIC_SCOPE: Scope = ()
# Number of parts of a view's scope.
VIEW_PARTS = 3


def scope_of(view: View) -> Scope:
    """Return the scope of a view's private nodes."""
    return view.subject.tenant, view.subject.name, view.salt


def view_of(scope: Scope) -> View:
    """Return the view whose private nodes have this scope."""
    tenant, subject, salt = scope
    return View(Subject(tenant, subject), salt)


@dataclass(frozen=True, slots=True)
class Resumption:
    """Continuation of a row from a cached prefix if the model has recurrent layers.

    It continues from `snapshot`, at the end of the lock's pages; None: from the first token. More of its pages may be
    cached: of these and the lock's, the first `public_pages` are PUBLIC and the next `tenant_pages` the tenant's. After
    `ends` pages each, other requests diverge, so snapshots there will be of use.
    """

    snapshot: SnapshotSlot | None
    public_pages: int
    tenant_pages: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """A row's lock on its path in the cache: no node of the path is evicted until the lock is released.

    Opaque: the cache maps `lock_id` to a path and may move it (`pages` is the path's content when the lock was made).
    `pages` is [matched_tokens / page_size] int32, read-only.
    """

    lock_id: LockId
    view: View
    matched_tokens: int
    pages: PageIds
    # Leading tokens of these that are PUBLIC, and the following ones that are the tenant's.
    public_tokens: int = 0
    tenant_tokens: int = 0
    # Set by `commit` only; None: the model has no recurrent layers, or nothing may be cached.
    resumption: Resumption | None = None


@dataclass(frozen=True, slots=True)
class Insertion:
    """Result of an insertion.

    `lock` replaces the lock passed in. `pages` is the row's page table prefix with canonical pages where the cache
    already had the same tokens. `duplicates` are the caller's pages that `pages` does not use, each reported once, by
    the insertion that finds it; the row's table differs from `pages` from index `first_duplicate` on. The cache has
    changed no reference of the row. A row that continues must be repointed, and then
    `PageAllocator.exchange(duplicates, canonical)` transfers its references; a row that ends with this insertion may
    keep its own pages. `canonical` are the replacements of `duplicates`, in the same order.
    """

    lock: PrefixLock
    pages: PageIds
    duplicates: PageIds
    canonical: PageIds
    first_duplicate: int | None = None


class NodeState(Enum):
    """Whether a node's pages are allocated. SOFT_FREE: they count as free, but can be matched until they are reclaimed.

    ON_HOST: the node and all its descendants have no device pages any more, only copies on the host.
    """

    LIVE = "live"
    SOFT_FREE = "soft_free"
    ON_HOST = "on_host"


class Visibility(Enum):
    """The views that contain a node: one view, those of a tenant, or all."""

    PRIVATE = "private"
    TENANT = "tenant"
    PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment; `TreeNode` in protos/pando/v1/scheduler.proto explains each field.

    `parent_id` is None for children of the root. `owner` is set for PRIVATE nodes, `tenant` for TENANT ones. `pages` is
    [edge_tokens / page_size] int32, read-only, and `key` are the edge's ids as the tree compares them (`keys.py`). Hits
    and users of the current and the previous epoch are those of subjects that are not among the `creators`. The node is
    hidden from `quarantined` subjects and `quarantined_tenants`. `promoted_tenants` is the number of tenants that
    shared a PUBLIC node before. `required_subjects` is how many subjects must compute its text for a promotion.
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
    key: bytes
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
    required_subjects: int = 0
    host_pages: PageIds | None = None
    host_ref: int = 0

    @property
    def token_ids(self) -> TokenIds:
        """The edge's ids without those of images, [edge_tokens less the tokens of images] int32."""
        return text_ids(self.key)


@dataclass(frozen=True, slots=True)
class OwnerSnapshot:
    """Usage of a view, of a tenant, or of the public if both are None; pages are counted regardless of other owners."""

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
    """Totals of the cache. A device page counts once per node that refers to it.

    `public_pages` and `tenant_pages` are those of LIVE nodes; `private_pages` are all others, soft-free ones included.
    """

    nodes: int
    views: int
    public_pages: int
    tenant_pages: int
    private_pages: int
    # Additional pages that would be needed without merging.
    merged_pages: int


class CacheEventKind(Enum):
    """Kind of a change; the event shows the node after it, with `edge_tokens` 0 if the node was removed.

    INSERTED: it is new, or its edge was extended. SPLIT: its edge was cut in two; one event for the new upper half,
    then one for the lower half, which keeps the id. SOFT_FREED: its pages count as free and can still be matched.
    REVIVED: its pages no longer count as free. RECLAIMED: it was soft-free and lost pages at its end, or it lost its
    copy on one tier. BACKED_UP: it has a copy on the host now. LOADED: it was ON_HOST and is LIVE again. EVICTED: it
    was dropped without having been soft-free, because a subject or session is forgotten or another node holds the same
    tokens. FLUSHED: has no node; the events of all dropped nodes precede it. PROMOTED: it is TENANT or PUBLIC now.
    DEMOTED: it was one of these and is removed; copies for its creators, or for the tenants that shared it before, were
    INSERTED before. QUARANTINED: it is hidden from some subjects, or from a whole tenant. MERGED: it refers to other
    pages with the same content, absorbed its parent, or moved below another parent with the same tokens.
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
    """One change of the tree. `sequence` increases by one per event, also while there are no listeners."""

    sequence: int
    kind: CacheEventKind
    node: NodeSnapshot | None


@dataclass(frozen=True, slots=True)
class PromotionCandidate:
    """A chain with enough evidence, from its first token on, [tokens] int32.

    `tenant` is the tenant that would share it, or empty for the public.
    """

    candidate_id: CandidateId
    token_ids: TokenIds
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Page accounting of one tier at one moment; free + soft_free + evictable + protected = capacity.

    `protected` pages belong to running rows or locked nodes. `unaccounted_references` is the difference between the
    allocator's references and those of rows and cache: above 0 pages leak, below 0 a page may be freed in use.
    """

    capacity: int
    free: int
    soft_free: int
    evictable: int
    protected: int
    unaccounted_references: int

    @property
    def is_exact(self) -> bool:
        """Whether every reference has a holder and no page is protected without being in use."""
        return self.unaccounted_references == 0 and self.protected >= 0
