"""The radix cache: one tree that serves as shared, isolated and user-aware cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES
from common.types import Sharing
from services.scheduler.cache.config import CacheConfig, EvictionPolicy, Mode
from services.scheduler.cache.insertion import Inserter
from services.scheduler.cache.keys import TOKEN_BYTES, PagedKey
from services.scheduler.cache.locks import LockedPath, LockTable, orphan
from services.scheduler.cache.sessions import forget_session, is_left_by, tag_path
from services.scheduler.cache.sharing.choices import Pins
from services.scheduler.cache.sharing.demotion import Demoter
from services.scheduler.cache.sharing.fleet import FleetFollower, FleetLedger
from services.scheduler.cache.sharing.merging import compress_chains, merge_private_subtree
from services.scheduler.cache.sharing.probe_detection import ProbeDetector
from services.scheduler.cache.sharing.promotion import Promoter
from services.scheduler.cache.snapshots import owner_snapshot
from services.scheduler.cache.state_snapshots import StateSnapshots
from services.scheduler.cache.store import NodeStore
from services.scheduler.cache.tiers.host_tier import HostTier
from services.scheduler.cache.tree import Reach
from services.scheduler.cache.types import PUBLIC_SCOPE, CacheEventKind, CacheUsage, Insertion, Resumption, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.events import CacheEvents
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.sharing.choices import SharingChoices
    from services.scheduler.cache.sharing.fleet import FleetNews, FleetReport
    from services.scheduler.cache.tiers.config import HostConfig
    from services.scheduler.cache.tree import PrefixMatch
    from services.scheduler.cache.types import (
        CandidateId,
        NodeSnapshot,
        OwnerSnapshot,
        PrefixLock,
        PromotionCandidate,
        Scope,
    )


class RadixCache:
    """Implements `PrefixCache`; `config.mode` decides which prefixes views share.

    This module has the work per request, `sharing/` the work at boundaries of sharing and of epochs.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        config: CacheConfig | None = None,
        host: HostConfig | None = None,
        choices: SharingChoices | None = None,
    ) -> None:
        """Start empty, over the pages of `allocator` and those of a host tier, if `host` has any.

        `choices` supplies the tenants' sharing choices; by default each shares within itself.
        """
        self.page_size = page_size
        self.config = config or CacheConfig()
        self.store = NodeStore(allocator, page_size, self.config, choices)
        self.locks = LockTable(page_size)
        self._fleet = FleetLedger(self.store)
        self._demoter = Demoter(self.store, self.locks, self._fleet)
        self._promoter = Promoter(self.store, self.locks, self._demoter.demoted, self._fleet)
        self._detector = ProbeDetector(self.store, self._demoter, self._fleet)
        self._follower = FleetFollower(self.store, self._fleet, self._demoter, self._detector)
        self._pins = Pins(page_size)
        self._inserter = Inserter(self.store, self._promoter, self._detector, self._pins)
        self._is_shared = self.config.mode is Mode.SHARED
        self._is_user_aware = self.config.mode is Mode.USER_AWARE
        self._has_priorities = self.config.eviction is EvictionPolicy.PRIORITY
        self.host: HostTier | None = None
        # None: the model has no recurrent layers.
        self.snapshots: StateSnapshots | None = None
        if self.config.snapshots:
            self.snapshots = allocator.snapshots = StateSnapshots(self.config, self.store.accounts, allocator.capacity)
        if host is not None and host.pages:
            self.host = HostTier(self.store, host, self._viewer)
        self._headroom = int(allocator.capacity * self.config.headroom_share)

    @property
    def events(self) -> CacheEvents:
        return self.store.events

    @property
    def epoch(self) -> int:
        return self.store.epoch

    @property
    def evictable_pages(self) -> int:
        return self.store.use.evictable

    @property
    def protected_pages(self) -> int:
        return self.store.use.protected

    @property
    def soft_free_pages(self) -> int:
        return self.store.use.soft_free

    @property
    def held_references(self) -> int:
        return self.store.use.references

    # --- a row's life ---

    def view_of(self, view: View) -> Scope:
        """Return the scope of the view's private nodes, or the public scope in shared mode."""
        return self._scope(view)

    def peek(self, view: View, token_ids: TokenIds) -> int:
        """Count the leading tokens that are cached in a view; changes nothing."""
        viewer = self._viewer(view)
        match = self._match(viewer, PagedKey(token_ids, self.page_size), len(token_ids))
        return self._usable(match, viewer)[0].pages * self.page_size

    def continuation(self, view: View, token_ids: TokenIds, most: int) -> TokenIds:
        """Return tokens that followed others in a view; see `PrefixCache.continuation`."""
        key = PagedKey(token_ids, self.page_size)
        tail = token_ids[key.pages * self.page_size :].astype("<i4").tobytes()
        found = self.store.tree.continuation(self._viewer(view), key, tail, most * TOKEN_BYTES)
        return np.frombuffer(found, "<i4").astype(np.int32)

    def commit(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        repeated: bool = False,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        """Match, lock, revive and touch the longest cached prefix, and count the hit on its shared part."""
        account = self.store.accounts.open(self._scope(view), self.store.epoch)
        key = PagedKey(token_ids, self.page_size)
        whole = self._match(account, key, len(token_ids))
        match, resumption = self._usable(whole, account)
        node, pages = self._lock_match(match, account)
        if self._is_user_aware and not repeated:
            self._detector.count(node, account, key, match.pages)
        locked = LockedPath(account, node, may_promote, sessions=None if session is None else frozenset((session,)))
        lock = self._open_lock(view, locked, pages, priority)
        return lock if resumption is None else replace(lock, resumption=resumption)

    def commit_pages(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        """Match, lock, revive and touch the longest cached prefix; see `PrefixCache.commit_pages`."""
        account = self.store.accounts.open(self._scope(view), self.store.epoch)
        match = self._match(account, PagedKey(token_ids, self.page_size), len(token_ids))
        node, pages = self._lock_match(match, account)
        locked = LockedPath(account, node, may_promote, sessions=None if session is None else frozenset((session,)))
        return self._open_lock(view, locked, pages, priority)

    def commit_nothing(self, view: View) -> PrefixLock:
        """Return an empty lock, through which nothing is inserted."""
        account = self.store.accounts.open(self._scope(view), self.store.epoch)
        return self.locks.open(LockedPath(account, None), view, NO_PAGES)

    def insert(self, lock: PrefixLock, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Insert the whole pages of `token_ids` below the lock; see `PrefixCache.insert`."""
        locked = self.locks.path_of(lock)
        key = PagedKey(token_ids, self.page_size)
        assert len(pages) >= key.pages, "a row's page table covers its tokens"
        first, above = len(lock.pages), locked.node
        if above is None or locked.is_closed:
            return Insertion(lock, pages[: key.pages].copy(), NO_PAGES, NO_PAGES)
        if key.pages <= first:
            return Insertion(lock, lock.pages, NO_PAGES, NO_PAGES)
        self.store.tier.restore(above, locked.account, key, first, pages)
        match = self.store.tree.match(above, locked.account, key, first, key.pages, Reach.COMPUTED)
        prompt_pages = min(prompt_tokens // self.page_size, key.pages)
        deepest = self._end_of(match)
        found = NO_PAGES
        if match.pages > first:
            found = self.store.tree.path_pages(deepest, above)
            if self._is_user_aware:
                self._inserter.claim(locked, deepest, match.pages, prompt_pages)
        added = pages[match.pages : key.pages]
        if len(added):
            deepest = self._inserter.grow(locked, deepest, key, added, prompt_pages)
        self.store.lock_path(deepest, above)
        self._enforce_quota(locked.account)
        self.locks.close(lock)
        locked.node = deepest
        tag_path(locked)
        known = np.concatenate([lock.pages, found, added])
        renewed = self.locks.open(locked, lock.view, known)
        own = pages[first : match.pages]
        replaced = np.flatnonzero(own != found) if len(found) else NO_PAGES
        if not len(replaced):
            return Insertion(renewed, known, NO_PAGES, NO_PAGES)
        return Insertion(renewed, known, own[replaced], found[replaced], first + int(replaced[0]))

    def release(self, lock: PrefixLock) -> None:
        locked = self.locks.close(lock)
        if locked.node is not None:
            self.store.unlock_path(locked.node, self.store.tree.root)
        if locked.held is not None:
            self.store.use.give_up(locked.held)
        self._enforce_quota(locked.account)
        self.store.accounts.close(locked.account)

    # --- memory ---

    def evict(self, pages: int) -> int:
        """Free at least `pages` pages, or all there are, and soft-free some more in advance."""
        freed = self._free(pages)
        while self.soft_free_pages < self._headroom and (node := self.store.queue.first()) is not None:
            self.store.soften(node, self._headroom - self.soft_free_pages)
        return freed

    def flush(self) -> int:
        """Drop everything that is not locked; return the number of pages that became free."""
        freed = self._free(self.store.allocator.capacity + 1)
        self.store.tier.flush()
        self.events.emit(CacheEventKind.FLUSHED)
        return freed

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Drop all private nodes of a subject or of one of its sessions, also while its rows run.

        Returns:
            How many pages became free.
        """
        if self._is_shared:
            return 0
        accounts = self.store.accounts.of_subject(subject)
        self.store.tier.forget(subject, accounts)
        freed = sum(self._forget(account, session) for account in accounts)
        if session is None:
            if self.snapshots is not None:
                self.snapshots.forget_subject(subject)
                if self.host is not None and self.host.states is not None:
                    self.host.states.forget(subject)
            self._forget_creator(subject)
        else:
            self.store.tier.renew(accounts)
        return freed

    def _forget(self, account: Account, session: str | None) -> int:
        for locked in self.locks.all():
            is_meant = session is None or (locked.sessions is not None and session in locked.sessions)
            # A row of a previously forgotten session may still use nodes that it had in common with this one.
            if locked.account is account and locked.node is not None and (is_meant or locked.is_closed):
                self._close(locked, locked.node, session)
        if session is not None:
            return forget_session(self.store, account, session)
        return sum(self.store.remove_below(top) for top in list(account.tops))

    def _forget_creator(self, subject: Subject) -> None:
        owners = self.store.accounts.public, self.store.accounts.owner((subject.tenant,))
        for node in self.store.tree.walk_owned(*owners):
            if node.creators is not None:
                node.creators.pop((subject.tenant, subject.name), None)
        self.store.accounts.forget_if_empty(owners[1])

    def _free(self, pages: int) -> int:
        freed = 0
        while freed < pages:
            if self.store.soft:
                freed += self.store.reclaim_oldest(pages - freed)
            elif (node := self.store.queue.first()) is not None:
                self.store.soften(node, pages - freed)
            else:
                break
        return freed

    def _enforce_quota(self, account: Account) -> None:
        """Soft-free a subject's own cold pages, in all its views, while it exceeds its quota."""
        queue = self.store.queue
        while (excess := queue.excess(account)) > 0 and (node := queue.first_of(account)) is not None:
            self.store.soften(node, excess)

    def _close(self, locked: LockedPath, node: Node, session: str | None) -> None:
        """Cut off the part of a locked path that is forgotten with its subject, or with one of its sessions."""
        locked.is_closed = True
        above = node
        while not above.is_shared and (session is None or is_left_by(above, session)):
            assert above.parent is not None, "the root is public"
            above = above.parent
        if above is node:
            return
        pages = self.store.tree.path_pages(node, above)
        self.store.unlock_path(node, above)
        orphan(self.store, locked, above, pages)

    # --- epochs and the operator ---

    def advance(self, epoch: int) -> None:
        """Start `epoch`: close the windows of the last one, apply tenants' choices, and `share`."""
        assert epoch >= self.store.epoch, "epochs only advance"
        if epoch == self.store.epoch:
            return
        self.store.epoch = epoch
        if self._is_user_aware:
            self._follow_choices()
            self._fleet.note_uses()
            self._detector.close()
        self.share()
        if self._is_user_aware:
            self._promoter.note(self._promoter.reviews.expire(epoch))
        idle = self.store.accounts.pop_idle(epoch)
        self.store.queue.begin_epoch(epoch, idle)
        self.store.tier.begin_epoch(epoch, idle)
        if self.snapshots is not None:
            self.snapshots.begin_epoch(epoch, idle)

    def share(self) -> None:
        """Apply pins, verdicts and the fleet's news, promote chains with enough evidence, merge pages."""
        if self.config.mode.allows_pins:
            for pin in self._pins.activate():
                self._promoter.publish_pin(pin)
        self._promoter.note(self._follower.apply())
        fresh = self._promoter.take_fresh()
        if self._is_user_aware:
            self._fleet.claim(fresh, self._demoter.demoted)
            self._promoter.promote(self._promoter.groups(fresh))
            self._promoter.note(merge_private_subtree(self.store, self._promoter.groups(fresh)))
        else:
            compress_chains(self.store)

    def adopt(self, limits: Limits) -> None:
        self.store.accounts.adopt(limits)

    def _follow_choices(self) -> None:
        """Apply the tenants' current choices; nodes of a tenant that stops sharing go back to their creators."""
        for tenant in self.store.accounts.refresh_sharing():
            if tenant.sharing is Sharing.GLOBAL:
                self._promoter.note(tenant.tops)
            elif tenant.sharing is Sharing.NONE:
                for top in list(tenant.tops):
                    self._demoter.demote(top, is_suspect=False)
        if self.config.share_across_tenants:
            self._demoter.withdraw()

    def pin(self, token_ids: TokenIds) -> int:
        return self._pins.add(token_ids)

    def unpin(self, token_ids: TokenIds) -> bool:
        """Undo `pin`; return whether there was such a pin.

        Nodes in memory stay public until they are evicted; stored pages become unreadable, and other pins are stored
        again.
        """
        if not self._pins.remove(token_ids):
            return False
        for node in self.store.tree.walk_owned(self.store.accounts.public):
            if node.pinned:
                self._promoter.set_pinned(node, is_pinned=False)
        for pin in self._pins.active:
            self._promoter.publish_pin(pin)
        if self.config.mode.allows_pins:
            self.store.tier.revoke(self.store.accounts.public)
        return True

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        return self._promoter.reviews.take()

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Record the verdict on a candidate; it applies from the next boundary on."""
        self._promoter.note(self._promoter.reviews.resolve(candidate_id, allowed_tokens))

    def forget_verdicts(self) -> None:
        self._promoter.reviews.forget_verdicts()

    def take_report(self) -> FleetReport:
        return self._fleet.take(self._demoter.demoted)

    def learn(self, news: FleetNews) -> None:
        self._follower.learn(news)

    @property
    def usage(self) -> CacheUsage:
        accounts, public = self.store.accounts, self.store.accounts.public.live_pages
        tenants = sum(account.live_pages for account in accounts.tenants())
        use = self.store.use
        return CacheUsage(
            nodes=self.store.tree.node_count,
            views=len(accounts),
            public_pages=public,
            tenant_pages=tenants,
            private_pages=use.references - public - tenants,
            merged_pages=max(use.references - use.evictable - use.protected - use.soft_free, 0),
        )

    def owners(self) -> Iterator[OwnerSnapshot]:
        accounts = self.store.accounts
        for account in (accounts.public, *accounts.tenants(), *accounts.all()):
            yield owner_snapshot(account, self.store.tier.pages_of(account))

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        tree = self.store.tree
        viewer = None if view is None else self.store.accounts.view(self._scope(view))
        for node, depth in tree.walk() if viewer is None else tree.walk_view(viewer):
            yield self.store.snapshot(node, depth)

    # --- helpers ---

    def _lock_match(self, match: PrefixMatch, account: Account) -> tuple[Node, PageIds]:
        """Lock the path of a match, and touch its snapshots; return its end and its pages."""
        node = self._end_of(match)
        pages = self.store.tree.path_pages(node, self.store.tree.root)
        if self.snapshots is not None:
            self.snapshots.touch(pages, account)
            if self.host is not None and self.host.states is not None:
                self.host.states.touch(node, account)
        self.store.lock_path(node, self.store.tree.root)
        return node, pages

    def _open_lock(self, view: View, locked: LockedPath, pages: PageIds, priority: int) -> PrefixLock:
        node = locked.node
        assert node is not None, "the path is in the tree"
        tag_path(locked)
        if self._has_priorities:
            locked.priority = priority
            self._inserter.raise_priority(node, priority)
        self.store.allocator.retain(pages)
        return self.locks.open(locked, view, pages, self.store.tree.shared_pages(node))

    def _viewer(self, view: View) -> Account:
        return self.store.accounts.view(self._scope(view))

    def _scope(self, view: View) -> Scope:
        return PUBLIC_SCOPE if self._is_shared else scope_of(view)

    def _match(self, viewer: Account, key: PagedKey, tokens: int) -> PrefixMatch:
        # The last token must be computed, for its logits.
        end = max(tokens - 1, 0) // self.page_size
        return self.store.tree.match(self.store.tree.root, viewer, key, 0, end)

    def _usable(self, match: PrefixMatch, viewer: Account) -> tuple[PrefixMatch, Resumption | None]:
        """Return the part of a match that a row can continue from.

        Sliding-window layers need their pages, too, and recurrent ones a snapshot that the view may use.
        """
        tree, windows, snapshots = self.store.tree, self.store.allocator.windows, self.snapshots
        if windows is None and snapshots is None:
            return match, None
        pages = tree.path_pages(match.node, tree.root)
        if match.partial is not None:
            pages = np.concatenate([pages, match.partial.pages[: match.partial_pages]])
        if windows is not None:
            pages = pages[: windows.usable_pages(pages)]
        if snapshots is None:
            return tree.shortened(match, len(pages)), None
        count, entry = snapshots.deepest(pages, viewer)
        public, tenant, ends = self._divergences(match)
        resumption = Resumption(None if entry is None else entry.slot, public, tenant, ends)
        return tree.shortened(match, count), resumption

    def _divergences(self, match: PrefixMatch) -> tuple[int, int, tuple[int, ...]]:
        """Return the numbers of PUBLIC and TENANT pages of a match, and after how many pages requests diverge.

        Within shared pages, private branches must not show: only ends of what is shared count there.
        """
        tree = self.store.tree
        public, tenant = tree.shared_pages(match.node)
        is_in_shared = match.partial is not None and match.partial.is_shared
        if match.partial is not None and is_in_shared:
            public += match.partial_pages if match.partial.is_public else 0
            tenant += 0 if match.partial.is_public else match.partial_pages
        ends = set()
        if match.pages > public + tenant:
            ends.add(match.pages)
        node: Node | None = match.node
        depth = match.node_pages
        while node is not None and depth:
            is_last = depth in (public, public + tenant)
            if node.is_shared and is_last and not any(child.owner is node.owner for child in tree.children(node)):
                ends.add(depth)
            depth -= node.size
            node = node.parent
        return public, tenant, tuple(sorted(ends))

    def _end_of(self, match: PrefixMatch) -> Node:
        """Return the node that ends where the match ends, splitting a longer one if necessary; the caller locks it."""
        if match.partial is None:
            return match.node
        return self.store.split(match.partial, match.partial_pages)
