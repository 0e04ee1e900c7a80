"""Primitive changes of the tree, each of which keeps pages, accounts, queue and events consistent."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from services.scheduler.cache.accounts import Accounts
from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.eviction import EvictionQueue
from services.scheduler.cache.page_use import PageUse
from services.scheduler.cache.snapshots import node_snapshot
from services.scheduler.cache.tiers.observer import NoTier
from services.scheduler.cache.tree import PageTree
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.sharing.choices import SharingChoices
    from services.scheduler.cache.tiers.observer import TierObserver
    from services.scheduler.cache.types import NodeSnapshot

_LIVE, _SOFT_FREE, _ON_HOST = NodeState.LIVE, NodeState.SOFT_FREE, NodeState.ON_HOST


class NodeStore:
    """Owns tree, accounts, eviction queue and soft-free list, over the pages of `allocator`.

    The cache's components change nodes only through it. It also owns `epoch` and the logical clock.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, config: CacheConfig, choices: SharingChoices | None = None
    ) -> None:
        """Start empty; `choices` supplies the tenants' sharing choices."""
        self.config = config
        self.allocator = allocator
        self.accounts = Accounts(config, choices)
        self.tree = PageTree(page_size, self.accounts.public)
        self.use = PageUse(allocator.capacity)
        self.queue: EvictionQueue[Node] = EvictionQueue(config, allocator.capacity, self.accounts)
        # Replaced by a host tier when one is created.
        self.tier: TierObserver = NoTier()
        self.events = CacheEvents()
        self.epoch = 0
        # Soft-free nodes, in the order of reclaiming; a node always comes after its descendants. Upper halves of
        # soft-free nodes that have just been split are not in it.
        self.soft: OrderedDict[Node, None] = OrderedDict()
        # Shared nodes with hits in the current epoch, whose window has to be closed at its end.
        self.touched: list[Node] = []
        # Private and TENANT nodes changed since the last boundary: only there can the evidence have become
        # sufficient.
        self.fresh: dict[Node, None] = {}
        # Nodes that might be joined with their only child.
        self.loose: dict[Node, None] = {}
        self._clock = 0

    # --- growing ---

    def attach(self, parent: Node, owner: Account, key: bytes, pages: PageIds, *, is_joint: bool = False) -> Node:
        """Attach a new unlocked leaf below `parent`, with a reference on each of its pages; then lock or `offer` it."""
        self.allocator.retain(pages)
        self.queue.discard(parent)
        node = self.tree.attach(parent, owner, key, pages)
        node.epoch, node.joint = self.epoch, is_joint
        owner.nodes += 1
        self._charge(owner, len(pages))
        self.use.enter(node)
        return node

    def attach_on_host(self, parent: Node, owner: Account, key: bytes, host_pages: PageIds) -> Node:
        """Attach a new leaf below `parent` that is on the host only, with a reference on each of its pages."""
        node = self.tree.attach(parent, owner, key, host_pages[:0])
        node.state = _ON_HOST
        parent.live_children -= 1
        node.epoch = self.epoch
        owner.nodes += 1
        self.tier.keep(node, host_pages)
        self.use.enter(node)
        self.touch(node)
        self.loose[parent] = None
        return node

    def extend(self, leaf: Node, key: bytes, pages: PageIds) -> None:
        """Extend the edge of a locked leaf that is not joint."""
        assert leaf.lock_ref
        assert not leaf.joint
        self.allocator.retain(pages)
        self.use.leave(leaf)
        self.tree.extend(leaf, key, pages)
        self.use.enter(leaf)
        self._charge(leaf.owner, len(pages))

    def split(self, node: Node, pages: int) -> Node:
        """Cut an edge; return the new upper half. A SOFT_FREE node must be locked or made LIVE immediately."""
        upper = self.tree.split(node, pages)
        upper.owner.nodes += 1
        if upper.hit_cur:
            self.touched.append(upper)
        if node in self.fresh:
            self.fresh[upper] = None
        self.loose[upper] = None
        self.tier.split(node, upper)
        self.emit(CacheEventKind.SPLIT, upper)
        self.emit(CacheEventKind.SPLIT, node)
        return upper

    # --- locks and recency ---

    def lock_path(self, node: Node, above: Node) -> None:
        """Lock the path from below `above` to `node`, revive it, and touch the whole path from the root."""
        at = node
        while at is not above:
            at.uses += 1
            if at.lock_ref:
                at.lock_ref += 1
            else:
                if at.state is _SOFT_FREE:
                    self.revive(at)
                elif at.queued:
                    self.queue.discard(at)
                self.use.lock(at)
            assert at.parent is not None
            at = at.parent
        self.touch(node)

    def unlock_path(self, node: Node, above: Node) -> None:
        """Remove one lock from the path from below `above` to `node`, and touch it, as it was in use until now."""
        self.touch(node)
        at = node
        while at is not above:
            assert at.lock_ref > 0
            if at.lock_ref > 1:
                at.lock_ref -= 1
            else:
                self.use.unlock(at)
                self.offer(at)
                self.tier.note(at)
            assert at.parent is not None
            at = at.parent

    def offer(self, node: Node) -> None:
        """Make a node a candidate for eviction, if it can be one and is not yet."""
        if node.lock_ref or node.live_children or node.queued or node.host_ref:
            return
        if node.state is _LIVE and node.parent is not None:
            self.queue.push(node)

    def touch(self, node: Node) -> None:
        """Record a use of the path from the root to `node`."""
        self._clock += 1
        while node.parent is not None:
            node.last_access = self._clock
            if node.epoch != self.epoch:
                node.roll_over(self.epoch)
            node = node.parent

    # --- logical free ---

    def soften(self, node: Node, pages: int) -> None:
        """Soft-free a candidate, or only its last `pages` pages if it is longer; they can still be matched."""
        self.queue.discard(node)
        upper = self.split(node, len(node.pages) - pages) if pages < len(node.pages) else node.parent
        assert upper is not None
        self.use.set_state(node, _SOFT_FREE)
        self._charge(node.owner, -len(node.pages))
        self.soft[node] = None
        upper.live_children -= 1
        self.tier.note(node)
        self.emit(CacheEventKind.SOFT_FREED, node)
        self.offer(upper)

    def revive(self, node: Node) -> None:
        """Make a soft-free node LIVE again; the caller revives its ancestors."""
        self.soft.pop(node, None)
        self.use.set_state(node, _LIVE)
        self._charge(node.owner, len(node.pages))
        assert node.parent is not None
        node.parent.live_children += 1
        self.queue.discard(node.parent)
        self.emit(CacheEventKind.REVIVED, node)

    def reclaim_oldest(self, pages: int) -> int:
        """Reclaim up to `pages` pages from the node soft-freed first; return the number of freed pages."""
        node = next(iter(self.soft))
        if node.host_pages is not None:
            return self._leave_device(node)
        if len(node.pages) <= pages:
            return self.remove(node, CacheEventKind.RECLAIMED)
        self.use.leave(node)
        dropped = self.tree.trim(node, pages)
        self.use.enter(node)
        self.emit(CacheEventKind.RECLAIMED, node)
        return self.allocator.release(dropped)

    def _leave_device(self, node: Node) -> int:
        """Drop the device pages of a soft-free node that has a host copy; return their number."""
        del self.soft[node]
        self.use.leave(node)
        dropped, node.pages = node.pages, node.pages[:0]
        node.state, node.joint = _ON_HOST, False
        self.use.enter(node)
        # Eviction page by page splits a node into many.
        self.loose[node] = None
        self.emit(CacheEventKind.RECLAIMED, node)
        return self.allocator.release(dropped)

    def load(self, node: Node, pages: PageIds) -> None:
        """Make a node that is on the host only LIVE on `pages`, below a LIVE parent; the caller offers it."""
        assert node.state is _ON_HOST
        assert len(pages) == node.size
        assert node.parent is not None
        self.allocator.retain(pages)
        self.use.leave(node)
        node.pages, node.state = pages.copy(), _LIVE
        node.pages.flags.writeable = False
        self.use.enter(node)
        self._charge(node.owner, len(pages))
        node.parent.live_children += 1
        self.queue.discard(node.parent)
        self.loose[node] = None
        self.emit(CacheEventKind.LOADED, node)

    # --- shrinking and reshaping ---

    def remove(self, leaf: Node, kind: CacheEventKind = CacheEventKind.EVICTED, *, heir: Node | None = None) -> int:
        """Remove an unlocked leaf from the tree; return the number of pages that became free.

        Its copy on the host and its snapshots go to `heir`, if any, which has the same parent and tokens.
        """
        assert leaf.lock_ref == 0
        if heir is not None:
            self.tier.take_over(leaf, heir)
        self.queue.discard(leaf)
        if leaf.state is _LIVE:
            self._charge(leaf.owner, -len(leaf.pages))
        else:
            self.soft.pop(leaf, None)
        self.use.leave(leaf)
        self.tier.leave(leaf)
        parent, owner = leaf.parent, leaf.owner
        pages = self.tree.detach(leaf)
        owner.nodes -= 1
        self.emit(kind, leaf)
        self.accounts.forget_if_empty(owner)
        assert parent is not None
        self.offer(parent)
        self.loose[parent] = None
        snapshots = self.allocator.snapshots
        if snapshots is not None and heir is None:
            snapshots.leave(pages, owner.scope)
        elif snapshots is not None and heir is not None and len(pages):
            snapshots.pass_on(pages, heir.pages, owner.scope)
        # A flood within an epoch must not fill memory with references to removed nodes.
        self.fresh.pop(leaf, None)
        self.loose.pop(leaf, None)
        return self.allocator.release(pages)

    def remove_below(self, top: Node) -> int:
        """Remove an unlocked node with all its descendants; return the number of pages that became free."""
        nodes = [top, *(node for node, _ in self.tree.walk(top))]
        return sum(self.remove(node) for node in reversed(nodes))

    def rehang(self, node: Node, parent: Node) -> None:
        """Move a subtree below another parent that holds the same tokens."""
        old = node.parent
        assert old is not None
        self.queue.discard(parent)
        self.tree.rehang(node, parent)
        self.tier.rehang(node, old)
        self.offer(parent)
        self.offer(old)
        self.emit(CacheEventKind.MERGED, node)

    def hand_over(self, node: Node, owner: Account) -> None:
        """Change the owner of a node that is not soft-free; the caller offers it again."""
        assert node.state is not _SOFT_FREE
        self.queue.discard(node)
        former = node.owner
        for account, sign in ((former, -1), (owner, 1)):
            account.nodes += sign
            self._charge(account, sign * len(node.pages))
        self.tree.hand_over(node, owner)
        self.tier.hand_over(node)
        self.accounts.forget_if_empty(former)

    def set_pages(self, node: Node, pages: PageIds) -> int:
        """Let an unlocked joint node refer to other pages of the same content; return the number of freed pages."""
        assert node.joint
        assert node.lock_ref == 0
        self.use.leave(node)
        old, node.pages = node.pages, pages
        node.pages.flags.writeable = False
        self.use.enter(node)
        return self.allocator.exchange(old, pages)

    def absorb_child(self, node: Node, child: Node) -> None:
        """Join a node and its only child, of equal locks and state; `child` remains, with the same end."""
        self.queue.discard(node)
        for half in (node, child):
            self.use.leave(half)
        self.tree.absorb_child(node, child)
        child.joint = child.joint or node.joint
        self.tier.absorb(node, child)
        self.use.enter(child)
        node.owner.nodes -= 1
        self.emit(CacheEventKind.MERGED, node)
        self.emit(CacheEventKind.MERGED, child)

    def _charge(self, account: Account, pages: int) -> None:
        """Count LIVE pages that an owner gained, or lost if negative."""
        account.live_pages += pages
        self.queue.charge(account, pages)

    def snapshot(self, node: Node, depth_pages: int) -> NodeSnapshot:
        """Return a snapshot of a node that ends `depth_pages` pages below the root."""
        return node_snapshot(self.tree, node, depth_pages, self.config.required_subjects(node.generation))

    def emit(self, kind: CacheEventKind, node: Node) -> None:
        """Notify the listeners of a change of `node`."""
        if self.events.is_heard(kind):
            self.events.emit(kind, self.snapshot(node, self.tree.depth_pages(node)))
        else:
            self.events.emit(kind)
