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

# Children by first page; several owners' children with the same page stand side by side in a dict of their own. So
# a child is found by (page, owner): one owner's child never takes the place of another's. A PUBLIC child is always the
# only one of its page.
Children = dict[bytes, "Node | dict[Account, Node]"]

_LIVE, _SOFT_FREE = NodeState.LIVE, NodeState.SOFT_FREE
# Views of one creator that keep what is demoted.
_SALTS_PER_CREATOR = 4


@dataclass(slots=True, eq=False, repr=False)
class Holder:
    """A tenant, or a subject of one, as the holder of a quota; one object each, so holders compare by identity.

    What a tenant's subjects share is held by a holder of its own beside them, and so is the public, as a tenant and as
    its only subject: such a holder `is_common`, and no quota limits it.

    `number` orders holders by their first request. `share` and `floor` are shares of a tier's pages; a tenant without
    `share` gets an equal part of what the others leave (see `EvictionQueue`). `members` counts the accounts of a
    subject, and the subjects of a tenant.
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

    `tenant` is the account of a view's tenant; a tenant's and the public's is itself. `sharing` is a tenant's choice as
    of the last epoch boundary, and `views` counts its views' accounts. `live_pages` are those of its LIVE nodes,
    counted as if nobody else held them: what others hold must not show in a quota. `tops` are its nodes below nodes
    of other owners; the public has none. `holder` is whose quota its pages count against: all views of a subject have
    the same.
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
    locks: int = 0
    last_epoch: int = 0
    is_active: bool = False
    tops: dict[Node, None] = field(default_factory=dict)
    has_sessions: bool = False
    _fingerprint: int | None = None

    def __post_init__(self, of_tenant: Account | None, of_holder: Holder | None) -> None:
        """Derive what follows from the scope."""
        self.tenant = self if of_tenant is None else of_tenant
        self.subject = self.scope[:2]
        # An account that is only looked with holds nothing.
        self.holder = Holder(self.subject, -1) if of_holder is None else of_holder

    @property
    def is_public(self) -> bool:
        """Whether every view sees its nodes."""
        return not self.scope

    @property
    def is_shared(self) -> bool:
        """Whether it is a tenant or the public, whose nodes more than one view sees."""
        return len(self.scope) < VIEW_PARTS

    @property
    def fingerprint(self) -> int:
        """64 bits that stand for the subject in counters, or for the tenant; equal in every process and run."""
        if self._fingerprint is None:
            text = "".join(f"{len(part)}:{part}" for part in self.subject).encode("utf-8", "surrogatepass")
            self._fingerprint = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        return self._fingerprint

    @property
    def party(self) -> Scope:
        """Whose use of PUBLIC nodes is judged together with this view's: its tenant's, or its subject's alone.

        Where a tenant shares nothing, its subjects must not have an effect on each other.
        """
        return self.subject if self.tenant.sharing is Sharing.NONE else self.scope[:1]


class Creator(NamedTuple):
    """A subject that has computed a shared node itself: the epoch in which it last did, and in which of its views.

    `evidence` is the epoch in which it last did by a request whose text may be shared, if it did.
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
    """Since when a shared node is hidden, from a subject of `tenant` or, with `is_whole`, from all of the tenant."""

    since: int
    tenant: str
    is_whole: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge of whole pages and what hangs below it; `README.md` explains the counters.

    `key` is the edge's tokens as `PagedKey` makes them, `pages` [edge pages] int32 on the device (none if its state is
    ON_HOST), `host_pages` the same on the host; arrays are replaced and never written to. `owner` is who may find it:
    a view, a tenant or the public.

    A PRIVATE node has `prompt_epoch`, the epoch in which its owner computed it from a prompt, if it did: generated
    tokens are no evidence. The others are called shared. Their `creators` are the subjects that computed them
    themselves, and `quarantined` maps the fingerprints of subjects and tenants that do not see them. `promoted` says
    how many subjects made a node shared, and in which epoch; a pin does without. A PUBLIC node has `parties`, the
    counters of each tenant (or subject, see `Account.party`), of which `hit_cur` to `u_pre` are the totals, and
    `tenants`, those that had it as TENANT before, with its generation there.

    `host_ref` counts the transfers that end in the node or below it, as `lock_ref` counts the locks: neither copy of
    it goes as long as there is one. `live_children`, `host_children`, `uses`, `queued` and `joint` serve eviction and
    accounting: children that are LIVE, children with a copy on the host, locks that covered the node, its entry in the
    eviction queue (0: none), and whether its pages may be named by other nodes, too.

    Only the root has no parent while it lives; a node without key is dead.
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
    # PRIVATE: those of the owner's sessions that have used it; None: also requests without session, or very many.
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
        """The scope of its owner: of a view, of a tenant, or the empty one of the public."""
        return self.owner.scope

    @property
    def visibility(self) -> Visibility:
        """Whose views it is in."""
        if self.owner.is_public:
            return Visibility.PUBLIC
        return Visibility.TENANT if self.owner.is_shared else Visibility.PRIVATE

    @property
    def is_public(self) -> bool:
        """Whether it is in every view, quarantine aside."""
        return not self.owner.scope

    @property
    def is_shared(self) -> bool:
        """Whether it is PUBLIC or TENANT."""
        return self.owner.is_shared

    @property
    def is_soft_free(self) -> bool:
        """Whether it counts as free."""
        return self.state is _SOFT_FREE

    @property
    def size(self) -> int:
        """Pages of the edge, on whichever tier."""
        return len(self.pages) or (0 if self.host_pages is None else len(self.host_pages))

    @property
    def is_dead(self) -> bool:
        """Whether it has left the tree."""
        return not self.key and self.parent is not None

    @property
    def distinct_users(self) -> int:
        """Distinct subjects with hits in the node's epoch; an estimate never exceeds the hits."""
        return min(self.u_cnt_l.count, self.hit_cur) if self.u_cnt_l is not None else 0

    def is_hidden_from(self, viewer: Account) -> bool:
        """Whether a shared node is not in the view of `viewer`, as its subject or its tenant seems to have probed it.

        A tenant's quarantine leaves it in the views of those that computed it themselves.
        """
        if self.quarantined is None:
            return False
        if viewer.fingerprint in self.quarantined:
            return True
        return viewer.tenant.fingerprint in self.quarantined and viewer.subject not in (self.creators or ())

    def add_creator(self, account: Account, epoch: int, config: CacheConfig, *, evidence: int | None) -> None:
        """Count the subject of `account` among the creators, if its party has not too many."""
        if self.creators is None:
            self.creators = {}
        subject, salt, party = account.subject, account.scope[2], account.party
        known = self.creators.get(subject)
        if known is None and len(self.creators) >= config.creators_limit:
            of_party = sum(other[: len(party)] == party for other in self.creators)
            if of_party >= config.creators_limit or len(self.creators) >= config.watched_pairs:
                return
        self.creators[subject] = (
            Creator(epoch, (salt,), evidence) if known is None else known.also(epoch, salt, evidence)
        )

    def roll_over(self, epoch: int) -> None:
        """Begin `epoch` in the counters: the window before it becomes `pre`, older ones are dropped."""
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
        """Give `other`, a part of the same edge, everything but place, key and pages; nothing mutable is shared."""
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
