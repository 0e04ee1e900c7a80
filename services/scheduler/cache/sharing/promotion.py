"""Promotion: sharing of chains that enough subjects of a tenant have computed themselves from their prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import Sharing
from services.scheduler.cache.config import MIN_TENANTS
from services.scheduler.cache.keys import chain_hashes, common_run
from services.scheduler.cache.sharing.counters import Window
from services.scheduler.cache.sharing.reviews import Reviews
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.cache.locks import LockTable
    from services.scheduler.cache.node import Account, Creator, Node, Quarantine
    from services.scheduler.cache.sharing.demotion import DemotedChains
    from services.scheduler.cache.sharing.fleet import FleetLedger
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import Scope, SubjectKey

_ON_HOST = NodeState.ON_HOST


@dataclass(slots=True)
class _History:
    """History of nodes that become one.

    `holders` are the owners of the private ones, with the epochs of their evidence, None if there is none.
    """

    holders: list[tuple[Account, int | None]]
    creators: dict[SubjectKey, Creator] = field(default_factory=dict)
    quarantined: dict[int, Quarantine] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)
    parties: dict[Scope, Window] = field(default_factory=dict)


class Promoter:
    """Promotes nodes at boundaries where the tree has grown: to TENANT, and from there to PUBLIC."""

    def __init__(self, store: NodeStore, locks: LockTable, demoted: DemotedChains, fleet: FleetLedger) -> None:
        """Change nodes of `store` and repoint `locks` that end in them.

        `demoted` raises the required evidence; `fleet` has the decisions by the evidence of all scheduler groups.
        """
        self.reviews = Reviews(store.config, store.tree.page_size)
        self._store = store
        self._locks = locks
        self._demoted = demoted
        self._fleet = fleet
        self._moved: dict[Node, Node] = {}

    def note(self, nodes: Iterable[Node]) -> None:
        """Examine these nodes at the next boundary."""
        for node in nodes:
            self._store.fresh[node] = None

    def take_fresh(self) -> list[Node]:
        """Return the nodes noted since the last boundary, and clear the list."""
        fresh, self._store.fresh = list(self._store.fresh), {}
        return fresh

    def groups(self, nodes: Iterable[Node]) -> list[tuple[Node, bytes]]:
        """Return parent and first page of the owners' topmost nodes above `nodes`, each pair once."""
        groups: dict[tuple[Node, bytes], None] = {}
        for node in nodes:
            if node.is_dead or node.is_public:
                continue
            top, parent = node, node.parent
            while parent is not None and parent.owner is node.owner:
                top, parent = parent, parent.parent
            assert parent is not None, "the root is public"
            groups[parent, self._store.tree.first_page(top)] = None
        return list(groups)

    def promote(self, groups: Iterable[tuple[Node, bytes]]) -> None:
        """Promote every chain with enough evidence that begins in one of `groups`."""
        stack = list(groups)
        while stack:
            parent, page = stack.pop()
            promoted = [] if parent.is_dead else self._promote_at(parent, page)
            stack.extend((node, following) for node in promoted if not node.is_dead for following in node.children)
        self._settle()

    def publish_pin(self, pin: bytes) -> None:
        """Make the cached part of a pinned prompt public."""
        tree = self._store.tree
        node, rest = tree.root, pin
        while rest and (members := tree.group(node, rest[: tree.page_bytes])):
            pages = common_run([rest, *(member.key for member in members)], tree.page_bytes)
            if members[0].is_public:
                node = self._store.split(members[0], pages) if pages < members[0].size else members[0]
                self._revive(node)
                self.set_pinned(node, is_pinned=True)
            else:
                node = self._share(members, pages, self._store.accounts.public, generation=node.generation)
                self.set_pinned(node, is_pinned=True)
                self._store.emit(CacheEventKind.PROMOTED, node)
                # Nodes below may have had enough evidence, and lacked only a shared parent.
                self.note(child for child in tree.children(node) if not child.is_public)
            rest = rest[pages * tree.page_bytes :]
        self._settle()

    def set_pinned(self, node: Node, *, is_pinned: bool) -> None:
        """Pin or unpin a public node, and update its position in the eviction order."""
        self._store.queue.discard(node)
        node.pinned = is_pinned
        self._store.offer(node)

    def _settle(self) -> None:
        if self._moved:
            self._locks.repoint(self._moved)
            self._moved = {}

    def _promote_at(self, parent: Node, page: bytes) -> list[Node]:
        """Promote the leading runs of a group that have enough evidence; return the promoted nodes."""
        members = self._store.tree.group(parent, page)
        if not members or members[0].is_public:
            return []
        by_tenant: dict[Account, list[Node]] = {}
        for member in members:
            if not member.is_shared:
                by_tenant.setdefault(member.owner.tenant, []).append(member)
        promoted = [
            node for tenant, own in by_tenant.items() if (node := self._try_tenant(parent, own, tenant)) is not None
        ]
        if self._store.config.share_across_tenants and parent.is_public:
            published = self._try_public(parent, self._store.tree.group(parent, page))
            if published is not None:
                promoted.append(published)
        return promoted

    def _try_tenant(self, parent: Node, members: list[Node], tenant: Account) -> Node | None:
        """Promote nodes to TENANT if enough of the tenant's subjects have computed them, here or in all groups."""
        if tenant.sharing is Sharing.NONE:
            return None
        if len(members) < self._store.config.promotion_subjects:
            return self._follow_fleet(parent, members, tenant)
        generation = max(member.generation for member in members)
        if parent.owner is tenant:
            generation = max(generation, parent.generation)
        own = self._try(parent, members, members, tenant, generation)
        return own or self._follow_fleet(parent, members, tenant)

    def _follow_fleet(self, parent: Node, members: list[Node], tenant: Account) -> Node | None:
        """Promote the run of a member that the fleet shares, as far as all members have it in common."""
        tree = self._store.tree
        above, start = tree.path_key(parent), tree.depth_pages(parent)
        pages, deepest = 0, members[0]
        for member in members:
            if self._fleet.knows_shared and self._evidence([member]):
                hashes = chain_hashes(above + member.key, tree.page_bytes)
                shared = self._fleet.shared_pages(tenant.scope, hashes[start:])
                if shared > pages:
                    pages, deepest = shared, member
        if not pages:
            return None
        generation = max(member.generation for member in members)
        if parent.owner is tenant:
            generation = max(generation, parent.generation)
        pages, generation = self._examine(tenant.scope, parent, [deepest], pages, generation)
        pages = min(pages, common_run([member.key for member in members], tree.page_bytes))
        if not pages:
            return None
        subjects = len(self._evidence(members))
        promoted = self._share(members, pages, tenant, generation)
        promoted.promoted = subjects, self._store.epoch
        self._store.emit(CacheEventKind.PROMOTED, promoted)
        return promoted

    def _try_public(self, parent: Node, members: list[Node]) -> Node | None:
        """Make nodes PUBLIC that several tenants with global sharing share, regardless of other owners' nodes."""
        sharing = [member for member in members if member.is_shared and member.owner.sharing is Sharing.GLOBAL]
        if len(sharing) < MIN_TENANTS:
            return None
        return self._try(parent, members, sharing, self._store.accounts.public, parent.generation)

    def _try(
        self, parent: Node, members: list[Node], evidence: list[Node], owner: Account, generation: int
    ) -> Node | None:
        """Promote the run that the `evidence` nodes have in common to `owner`, if the evidence suffices."""
        config, tree = self._store.config, self._store.tree
        if owner.is_public:
            # The creators of a node that was promoted by other groups' evidence are not all known here.
            least = config.promotion_subjects if config.has_fleet else 0
            subjects = sum(max(len(member.creators or ()), least if member.promoted else 0) for member in evidence)
            tenants = len(evidence)
        else:
            subjects, tenants = len(self._evidence(evidence)), MIN_TENANTS
        if subjects < config.promotion_subjects:
            return None
        pages = common_run([member.key for member in evidence], tree.page_bytes)
        if config.content_check or len(self._demoted):
            pages, generation = self._examine(owner.scope, parent, evidence, pages, generation)
        # Two tenants that share a text have 2k subjects anyway, so after a demotion more tenants are required, too.
        factor = config.profile.repromotion_factor if generation else 1
        least = MIN_TENANTS * (factor if owner.is_public else 1)
        if not pages or subjects < config.required_subjects(generation) or tenants < least:
            return None
        # Where other members' runs end earlier, the rest follows as a separate group.
        pages = min(pages, common_run([member.key for member in members], tree.page_bytes))
        promoted = self._share(members, pages, owner, generation)
        promoted.promoted = subjects, self._store.epoch
        self._store.emit(CacheEventKind.PROMOTED, promoted)
        return promoted

    def _evidence(self, members: Iterable[Node]) -> dict[SubjectKey, int]:
        """Return the subjects that have recently computed the nodes from a prompt, in any view, with the epochs."""
        oldest = self._store.epoch - self._store.config.promotion_epochs
        found: dict[SubjectKey, int] = {}
        for member in members:
            epoch, subject = member.prompt_epoch, member.owner.subject
            if epoch is not None and epoch >= oldest and not member.no_promote:
                found[subject] = max(epoch, found.get(subject, epoch))
        return found

    def _examine(self, scope: Scope, parent: Node, members: list[Node], pages: int, generation: int) -> tuple[int, int]:
        """Cut a run at a chain that `scope` has lost by a demotion, or that the content check has not allowed."""
        tree = self._store.tree
        start = tree.depth_pages(parent)
        key = tree.path_key(parent) + members[0].key[: pages * tree.page_bytes]
        hashes = chain_hashes(key, tree.page_bytes)
        pages, generation = self._demoted.examine(scope, hashes[start:], generation)
        if self._store.config.content_check:
            end = start + pages
            allowed = self.reviews.allowed_pages(scope, hashes[:end], key, members, self._store.epoch)
            pages = max(allowed - start, 0)
        return pages, generation

    def _share(self, members: list[Node], pages: int, owner: Account, generation: int) -> Node:
        """Join the first `pages` pages of all members into one node of `owner`, a tenant or the public.

        The members' duplicate pages are released, but rows keep theirs; children and locks move to the node.
        """
        store = self._store
        halves = [store.split(member, pages) if pages < member.size else member for member in members]
        history = self._history(halves)
        canonical = min(
            halves, key=lambda half: (half.state is _ON_HOST, half.is_soft_free, -half.lock_ref, half.node_id)
        )
        self._revive(canonical)
        for half in halves:
            if half is not canonical:
                self._absorb(half, canonical)
        store.hand_over(canonical, owner)
        canonical.prompt_epoch, canonical.no_promote, canonical.generation = None, False, generation
        canonical.sessions = None
        self._set_history(canonical, history)
        if self._fleet.has_quarantines:
            proven = {holder.fingerprint for holder, _ in history.holders}
            others = self._fleet.quarantines_of(canonical)
            hidden = {fingerprint: one for fingerprint, one in others.items() if fingerprint not in proven}
            canonical.quarantined = {**(canonical.quarantined or {}), **hidden} or None
        store.offer(canonical)
        return canonical

    def _history(self, halves: list[Node]) -> _History:
        """Return the joint history of nodes that become one."""
        shared = [half for half in halves if half.is_shared]
        evidence = self._evidence(halves)
        private = [half.owner for half in halves if not half.is_shared]
        private.sort(key=lambda owner: owner.subject not in evidence)
        history = _History([(owner, evidence.get(owner.subject)) for owner in private])
        for half in shared:
            history.creators.update(half.creators or {})
            history.quarantined.update(half.quarantined or {})
            history.tenants[half.owner.scope[0]] = half.generation
            if (half.hit_cur or half.hit_pre) and half.epoch == self._store.epoch:
                history.parties[half.owner.scope] = Window(half.hit_cur, half.u_cnt_l, half.hit_pre, half.u_pre)
        return history

    def _set_history(self, node: Node, history: _History) -> None:
        """Set the history of a shared node to that of the nodes that it was made from."""
        node.creators = history.creators
        for owner, evidence in history.holders:
            epoch = self._store.epoch if evidence is None else evidence
            node.add_creator(owner, epoch, self._store.config, evidence=evidence)
        node.quarantined = history.quarantined or None
        if node.is_public:
            node.tenants, node.parties = history.tenants or None, history.parties or None
        windows = list(history.parties.values())
        node.hit_cur, node.hit_pre = (
            sum(window.hits for window in windows),
            sum(window.previous_hits for window in windows),
        )
        node.u_pre = sum(window.previous_users for window in windows)
        node.u_cnt_l = next((window.users.copy() for window in windows if window.users is not None), None)
        if windows:
            node.epoch = self._store.epoch
        if node.hit_cur:
            self._store.touched.append(node)

    def _revive(self, node: Node) -> None:
        """Make a node and its ancestors LIVE, including an upper half that has just been split off."""
        at: Node | None = node
        while at is not None and at.is_soft_free:
            self._store.revive(at)
            self._store.offer(at)
            at = at.parent

    def _absorb(self, half: Node, canonical: Node) -> None:
        """Move children and locks of `half` to `canonical`, which holds the same tokens, and remove `half`."""
        store = self._store
        for child in store.tree.children(half):
            store.rehang(child, canonical)
        locks = half.lock_ref
        if locks:
            if not canonical.lock_ref:
                store.queue.discard(canonical)
                store.use.lock(canonical)
                locks -= 1
            canonical.lock_ref += locks
            half.lock_ref = 1
            store.use.unlock(half)
            self._moved[half] = canonical
        canonical.last_access = max(canonical.last_access, half.last_access)
        canonical.priority = max(canonical.priority, half.priority)
        canonical.uses += half.uses
        store.remove(half, heir=canonical)
