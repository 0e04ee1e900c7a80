"""Nodes of the tree (a run of pages, its visibility and its counters) and the accounts that own them."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from common.types import Sharing
from services.scheduler.cache.sharing.counters import Window
from services.scheduler.cache.types import VIEW_PARTS, NodeState, Visibility

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.sharing.counters import DistinctCount
    from services.scheduler.cache.types import NodeId, Scope, SubjectKey

# Children by first page; children of several owners with the same page are in a nested dict. A child is thus found by
# (page, owner), and one owner's child never replaces another's. A PUBLIC child is always the only one of its page.
Children = dict[bytes, "Node | dict[Account, Node]"]

_LIVE, _SOFT_FREE = NodeState.LIVE, NodeState.SOFT_FREE
# Number of views of one creator that keep a demoted node.
_SALTS_PER_CREATOR = 4


@dataclass(slots=True, eq=False, repr=False)
class Holder:
    """A tenant, or a subject of one, as the holder of a quota; one object each, so holders compare by identity.

    Nodes shared by a tenant's subjects belong to a separate holder beside them, and so do the public's, both as tenant
    and as its only subject: such a holder `is_common`, and has no share of its own.

    `number` orders holders by their first request. `share` and `floor` are shares of a tier's pages; a tenant without
    `share` gets an equal part of the pages that the others leave (see `EvictionQueue`). `members` counts the accounts
    of a subject, and the subjects of a tenant.
    """

    scope: Scope
    number: int
    is_common: bool = False
    parent: Holder | None = None
    share: float | None = None
    floor: float = 0.0
    members: int = 0
    last_epoch: int = 0
    is_active: bool = False

    @property
    def tenant(self) -> Holder:
        """The tenant that a subject belongs to; a tenant itself."""
        return self if self.parent is None else self.parent


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """An owner of nodes: a view, a tenant or the public. There is one object per scope; owners compare by identity.

    `tenant` is the account of a view's tenant; for a tenant and the public it is the account itself. `sharing` is a
    tenant's choice as of the last epoch boundary, and `views` counts its views' accounts. `live_pages` are those of its
    LIVE nodes, counted regardless of other owners of the same pages: quotas must not depend on other owners. `tops` are
    its nodes below nodes of other owners; the public has none. `holder` is the holder whose quota its pages count
    against: all views of a subject have the same. `is_shared` marks a tenant or the public, whose nodes are in more
    than one view.
    """

    scope: Scope
    of_tenant: InitVar[Account | None] = None
    of_holder: InitVar[Holder | None] = None
    tenant: Account = field(init=False)
    subject: SubjectKey = field(init=False)
    holder: Holder = field(init=False)
    sharing: Sharing | None = None
    views: int = 0
    live_pages: int = 0
    nodes: int = 0
    # Of recurrent states, on both tiers: in pages of nodes that became shared, they may be all that a view has.
    snapshots: int = 0
    locks: int = 0
    last_epoch: int = 0
    is_active: bool = False
    tops: dict[Node, None] = field(default_factory=dict)
    has_sessions: bool = False
    is_public: bool = field(init=False)
    is_shared: bool = field(init=False)
    _fingerprint: int | None = None

    def __post_init__(self, of_tenant: Account | None, of_holder: Holder | None) -> None:
        """Derive the dependent fields from the scope."""
        self.tenant = self if of_tenant is None else of_tenant
        self.subject = self.scope[:2]
        self.is_public = not self.scope
        self.is_shared = len(self.scope) < VIEW_PARTS
        # An account created for a lookup only holds nothing.
        self.holder = Holder(self.subject, -1) if of_holder is None else of_holder

    @property
    def fingerprint(self) -> int:
        """64-bit hash of the subject, or of the tenant, for counters; equal in every process and run."""
        if self._fingerprint is None:
            text = "".join(f"{len(part)}:{part}" for part in self.subject).encode("utf-8", "surrogatepass")
            self._fingerprint = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        return self._fingerprint

    @property
    def party(self) -> Scope:
        """The scope whose use of PUBLIC nodes is judged together with this view's: its tenant's, or only its subject's.

        In a tenant that shares nothing, subjects must not affect each other.
        """
        return self.subject if self.tenant.sharing is Sharing.NONE else self.scope[:1]


class Creator(NamedTuple):
    """A subject that has computed a shared node itself: the epoch in which it last did, and the salts of its views.

    `evidence` is the epoch of its last computation by a request whose text may be shared, None if there was none.
    """

    epoch: int
    salts: tuple[str, ...]
    evidence: int | None = None

    def also(self, epoch: int, salt: str, evidence: int | None) -> Creator:
        """Return the creator after one more computation."""
        salts = (*(other for other in self.salts if other != salt), salt)
        latest = max((each for each in (self.evidence, evidence) if each is not None), default=None)
        return Creator(max(self.epoch, epoch), salts[-_SALTS_PER_CREATOR:], latest)


class Quarantine(NamedTuple):
    """Quarantine of a shared node since epoch `since`: for a subject of `tenant`, or with `is_whole` for the tenant."""

    since: int
    tenant: str
    is_whole: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge of whole pages, with the nodes below it; `README.md` explains the counters.

    `key` is the edge's tokens as bytes (see `PagedKey`), `pages` [edge pages] int32 on the device (empty if its state
    is ON_HOST), `host_pages` likewise on the host; arrays are replaced and never written to. `owner` is the view, the
    tenant or the public that it is visible to.

    For a PRIVATE node, `prompt_epoch` is the epoch in which its owner computed it from a prompt, if it did: generated
    tokens are no evidence. The other nodes are called shared. Their `creators` are the subjects that computed them
    themselves, and `quarantined` maps the fingerprints of the subjects and tenants that they are hidden from.
    `promoted` is the number of subjects whose evidence made a node shared, and the epoch; None for a pin. A PUBLIC node
    has `parties`, the counters of each tenant (or subject, see `Account.party`), of which `hit_cur` to `u_pre` are the
    totals, and `tenants`, the tenants that shared it before, with its generation there.

    `host_ref` counts the transfers that end in the node or below it, as `lock_ref` counts the locks: neither copy of
    the node is dropped while there is one. `live_children`, `host_children`, `uses`, `queued` and `joint` serve
    eviction and accounting: LIVE children, children with a copy on the host, locks that covered the node, its entry in
    the eviction queue (0: none), and whether other nodes may refer to its pages, too.

    Among nodes in the tree, only the root has no parent; a node without key is dead.
    """

    node_id: NodeId
    parent: Node | None
    owner: Account
    key: bytes
    pages: PageIds
    epoch: int = 0
    last_access: int = 0
    lock_ref: int = 0
    state: NodeState = _LIVE
    hit_cur: int = 0
    u_cnt_l: DistinctCount | None = None
    hit_pre: int = 0
    u_pre: int = 0
    parties: dict[Scope, Window] | None = None
    creators: dict[SubjectKey, Creator] | None = None
    quarantined: dict[int, Quarantine] | None = None
    tenants: dict[str, int] | None = None
    prompt_epoch: int | None = None
    host_pages: PageIds | None = None
    host_ref: int = 0
    priority: int = 0
    # PRIVATE nodes: the owner's sessions that used it; None: also requests without a session, or too many sessions.
    sessions: frozenset[str] | None = None
    pinned: bool = False
    no_promote: bool = False
    generation: int = 0
    promoted: tuple[int, int] | None = None
    live_children: int = 0
    host_children: int = 0
    uses: int = 0
    queued: int = 0
    joint: bool = False
    children: Children = field(default_factory=dict)

    @property
    def owner_id(self) -> Scope:
        """The scope of its owner: a view's, a tenant's, or the empty one of the public."""
        return self.owner.scope

    @property
    def visibility(self) -> Visibility:
        """The views that contain it."""
        if self.owner.is_public:
            return Visibility.PUBLIC
        return Visibility.TENANT if self.owner.is_shared else Visibility.PRIVATE

    @property
    def is_public(self) -> bool:
        """Whether it is in every view, except for quarantines."""
        return self.owner.is_public

    @property
    def is_shared(self) -> bool:
        """Whether it is PUBLIC or TENANT."""
        return self.owner.is_shared

    @property
    def is_soft_free(self) -> bool:
        """Whether its pages count as free."""
        return self.state is _SOFT_FREE

    @property
    def size(self) -> int:
        """Pages of the edge, on either tier."""
        return len(self.pages) or (0 if self.host_pages is None else len(self.host_pages))

    @property
    def is_dead(self) -> bool:
        """Whether it has been removed from the tree."""
        return not self.key and self.parent is not None

    @property
    def distinct_users(self) -> int:
        """Distinct subjects with hits in the node's epoch; an estimate never exceeds the hits."""
        return min(self.u_cnt_l.count, self.hit_cur) if self.u_cnt_l is not None else 0

    def is_hidden_from(self, viewer: Account) -> bool:
        """Whether a shared node is quarantined for `viewer`, whose subject or tenant appears to have probed it.

        A tenant's quarantine does not apply to subjects that computed the node themselves.
        """
        if self.quarantined is None:
            return False
        if viewer.fingerprint in self.quarantined:
            return True
        return viewer.tenant.fingerprint in self.quarantined and viewer.subject not in (self.creators or ())

    def add_creator(self, account: Account, epoch: int, config: CacheConfig, *, evidence: int | None) -> None:
        """Add the subject of `account` to the creators, unless its party has too many."""
        if self.creators is None:
            self.creators = {}
        subject, salt, party = account.subject, account.scope[2], account.party
        known = self.creators.get(subject)
        if known is None and len(self.creators) >= config.profile.creators_limit:
            of_party = sum(other[: len(party)] == party for other in self.creators)
            if of_party >= config.profile.creators_limit or len(self.creators) >= config.profile.watched_pairs:
                return
        self.creators[subject] = (
            Creator(epoch, (salt,), evidence) if known is None else known.also(epoch, salt, evidence)
        )

    def roll_over(self, epoch: int) -> None:
        """Start `epoch` in the counters: the last epoch's counts become the previous ones, older ones are dropped."""
        gap = epoch - self.epoch
        if not gap:
            return
        assert gap > 0, "epochs only advance"
        self.hit_pre, self.u_pre = (self.hit_cur, self.distinct_users) if gap == 1 else (0, 0)
        self.hit_cur, self.u_cnt_l = 0, None
        self.epoch = epoch
        if self.parties is not None:
            closed = self.parties.items() if gap == 1 else ()
            self.parties = {
                party: Window(0, None, window.hits, window.distinct_users) for party, window in closed if window.hits
            } or None

    def copy_history_to(self, other: Node) -> None:
        """Copy all but position, key and pages to `other`, a part of the same edge; mutable state is not shared."""
        other.epoch, other.last_access, other.uses = self.epoch, self.last_access, self.uses
        other.hit_cur, other.hit_pre, other.u_pre = self.hit_cur, self.hit_pre, self.u_pre
        other.u_cnt_l = None if self.u_cnt_l is None else self.u_cnt_l.copy()
        other.creators = None if self.creators is None else dict(self.creators)
        other.quarantined = None if self.quarantined is None else dict(self.quarantined)
        other.tenants = None if self.tenants is None else dict(self.tenants)
        if self.parties is not None:
            other.parties = {party: window.copy() for party, window in self.parties.items()}
        other.prompt_epoch = self.prompt_epoch
        other.lock_ref, other.host_ref, other.state = self.lock_ref, self.host_ref, self.state
        other.priority, other.pinned, other.no_promote = self.priority, self.pinned, self.no_promote
        other.sessions = self.sessions
        other.generation, other.joint, other.promoted = self.generation, self.joint, self.promoted
