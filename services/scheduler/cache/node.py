"""Nodes of the tree: a run of pages, who sees it, and what is known of its use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.cache.interface import NodeState, Visibility

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.accounts import Account, Scope
    from services.scheduler.cache.counters import DistinctCount
    from services.scheduler.cache.interface import NodeId

# Children by first page; several owners' children with the same page stand side by side in a dict of their own. So
# a child is found by (page, owner): one principal's child never takes the place of another's.
Children = dict[bytes, "Node | dict[Account, Node]"]

_LIVE, _SOFT_FREE = NodeState.LIVE, NodeState.SOFT_FREE


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge of whole pages and what hangs below it; `cache.md` section 2 explains the counters.

    `key` is the edge's tokens as `PagedKey` makes them, `pages` [edge pages] int32 on the device (none if its state is
    ON_HOST), `host_pages` the same on the host; arrays are replaced and never written to. `owner` is who may find it,
    the public account for PUBLIC nodes. `creators` of a PUBLIC node maps those who computed it themselves to the epoch
    in which they last did; a PRIVATE one has `prompt_epoch`, the epoch in which its owner computed it from a prompt, if
    it did: generated tokens are no evidence. `quarantined` maps the fingerprints of principals that do not see this
    PUBLIC node to the epoch in which that began. `promoted` says how many principals made it PUBLIC, and in which
    epoch; a pin does without.

    `host_ref` counts the transfers that end in the node or below it, as `lock_ref` counts the leases: neither copy of
    it goes as long as there is one. `live_children`, `host_children`, `uses`, `queued` and `joint` serve eviction and
    accounting: children that are LIVE, children with a copy on the host, leases that covered the node, its entry in the
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
    creators: dict[Scope, int] | None = None
    quarantined: dict[int, int] | None = None
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
        """The principal of a PRIVATE node, the empty scope of a PUBLIC one."""
        return self.owner.scope

    @property
    def visibility(self) -> Visibility:
        """Whose views it is in."""
        return Visibility.PUBLIC if self.owner.is_public else Visibility.PRIVATE

    @property
    def is_public(self) -> bool:
        """Whether everybody sees it, quarantine aside."""
        return not self.owner.scope

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

    def copy_history_to(self, other: Node) -> None:
        """Give `other`, a part of the same edge, everything but place, key and pages; nothing mutable is shared."""
        other.epoch, other.last_access, other.uses = self.epoch, self.last_access, self.uses
        other.hit_cur, other.hit_pre, other.u_pre = self.hit_cur, self.hit_pre, self.u_pre
        other.u_cnt_l = None if self.u_cnt_l is None else self.u_cnt_l.copy()
        other.creators = None if self.creators is None else dict(self.creators)
        other.quarantined = None if self.quarantined is None else dict(self.quarantined)
        other.prompt_epoch = self.prompt_epoch
        other.lock_ref, other.host_ref, other.state = self.lock_ref, self.host_ref, self.state
        other.priority, other.pinned, other.no_promote = self.priority, self.pinned, self.no_promote
        other.sessions = self.sessions
        other.generation, other.joint, other.promoted = self.generation, self.joint, self.promoted
