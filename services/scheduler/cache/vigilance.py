"""Watches how public nodes are used, and takes them out of the view of those who seem to probe."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from services.scheduler.cache.counters import DistinctCount, distinct, roll_over
from services.scheduler.cache.interface import CacheEventKind

if TYPE_CHECKING:
    from services.scheduler.cache.accounts import Account
    from services.scheduler.cache.demotion import Demoter
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.store import NodeStore


class Vigilance:
    """Counts hits on public nodes, and tests each window when it closes.

    Probing shows as many hits by few principals. That alone is no sign: three users of an app may ask ten thousand
    times. But only hits of principals that have not computed the text themselves are counted, and a window with as
    many of these as a promotion asks for is healthy however many hits it has: they are the same evidence again. A
    suspect loses sight of the node until it computes the text itself, which costs an honest one a single prefill.
    """

    def __init__(self, store: NodeStore, demoter: Demoter) -> None:
        """Watch the nodes of `store`."""
        self._store = store
        self._demoter = demoter
        # Distinct missing continuations in this epoch, by node and principal.
        self._tries: dict[tuple[Node, int], DistinctCount] = {}

    def count(self, node: Node, account: Account, missing_page: bytes | None) -> None:
        """Count one request's hit on each PUBLIC node up to `node`.

        Args:
            node: Where the path in the requester's view ends.
            account: The requester.
            missing_page: The whole page that it asked for next and `node` has not.
        """
        deepest = node
        while not deepest.is_public:
            assert deepest.parent is not None, "the root is public"
            deepest = deepest.parent
        at, fingerprint = deepest, account.fingerprint
        while at.parent is not None:
            if at.creators is None or account.scope not in at.creators:
                if not at.hit_cur:
                    self._store.touched.append(at)
                at.hit_cur += 1
                if at.u_cnt_l is None:
                    at.u_cnt_l = DistinctCount()
                at.u_cnt_l.add(fingerprint)
            at = at.parent
        if missing_page is None or deepest is not node or node.parent is None:
            return
        if account.scope not in (node.creators or ()):
            tries = self._tries.get((node, fingerprint))
            if tries is None and len(self._tries) < self._store.config.watched_pairs:
                tries = self._tries[node, fingerprint] = DistinctCount()
            if tries is not None:
                tries.add(crc32(missing_page))

    def close(self) -> None:
        """Test the windows that end as the store's epoch begins, and begin new ones."""
        touched, self._store.touched = self._store.touched, []
        suspects: dict[Node, set[int]] = {}
        for node in touched:
            if node.is_dead or not node.is_public:
                continue
            if not node.pinned and (found := self._suspects(node)):
                suspects[node] = set(found)
            roll_over(node, self._store.epoch)
        for (node, fingerprint), tries in self._tries.items():
            if tries.count >= self._store.config.continuation_limit and not (node.is_dead or node.pinned):
                suspects.setdefault(node, set()).add(fingerprint)
        self._tries.clear()
        # A demotion takes what is below along.
        for node in sorted(suspects, key=self._store.tree.depth_pages):
            if node.is_public and not node.is_dead:
                self._quarantine(node, suspects[node])

    def admit(self, node: Node, account: Account) -> None:
        """Note that a principal has computed a public node's tokens itself: it learns nothing from seeing it."""
        if node.quarantined is not None:
            node.quarantined.pop(account.fingerprint, None)
            node.quarantined = node.quarantined or None
        if node.creators is None:
            node.creators = {}
        if account.scope in node.creators or len(node.creators) < self._store.config.creators_limit:
            node.creators[account.scope] = self._store.epoch

    def _suspects(self, node: Node) -> tuple[int, ...]:
        """Return who seems to probe a node, by the window that closes and the one before."""
        config = self._store.config
        users, hits = distinct(node), node.hit_cur
        enough = config.promotion_principals * (config.repromotion_factor if node.generation else 1)
        if hits < config.hit_min or users >= enough or users > config.diversity_min * hits:
            return ()
        was_low = node.hit_pre >= config.hit_min and node.u_pre <= min(config.diversity_min * node.hit_pre, enough - 1)
        has_jumped = (
            node.u_pre <= 1
            and hits >= config.jump_factor * max(node.hit_pre, 1)
            and len(node.creators or ()) <= config.few_creators
        )
        assert node.u_cnt_l is not None, "there were hits"
        return node.u_cnt_l.members if was_low or has_jumped else ()

    def _quarantine(self, node: Node, fingerprints: set[int]) -> None:
        """Hide a node from suspects; if there have been several lately, it was no public text."""
        epoch = self._store.epoch
        quarantined = {**(node.quarantined or {}), **dict.fromkeys(sorted(fingerprints), epoch)}
        node.quarantined = quarantined
        self._store.emit(CacheEventKind.QUARANTINED, node)
        if self._store.host is not None and self._store.host.storage is not None:
            self._store.host.storage.distrust(sorted(fingerprints))
        oldest = epoch - self._store.config.quarantine_epochs
        recent = sum(since >= oldest for since in quarantined.values())
        if recent >= self._store.config.demotion_quarantines:
            self._demoter.demote(node)
