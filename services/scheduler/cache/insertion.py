"""Insertion of a row's computed pages into the tree, with their owners and their value as evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import Sharing
from services.scheduler.cache.config import Mode
from services.scheduler.cache.node import Creator
from services.scheduler.cache.types import CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.steps import PageIds
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.locks import LockedPath
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.sharing.choices import Pins
    from services.scheduler.cache.sharing.probe_detection import ProbeDetector
    from services.scheduler.cache.sharing.promotion import Promoter
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import SubjectKey


class Inserter:
    """Adds new pages below a lock's path, and records which views have computed them."""

    def __init__(self, store: NodeStore, promoter: Promoter, detector: ProbeDetector, pins: Pins) -> None:
        """Change nodes of `store`; report evidence to `promoter` and computations of shared nodes to `detector`."""
        self._store = store
        self._promoter = promoter
        self._detector = detector
        self._pins = pins
        self._is_user_aware = store.config.mode is Mode.USER_AWARE
        self._allows_pins = store.config.mode.allows_pins

    def claim(self, locked: LockedPath, deepest: Node, end: int, prompt_pages: int) -> None:
        """Record that a row has computed tokens that its view already had, from below the locked path to `deepest`.

        Args:
            locked: The row's locked path.
            deepest: The end of the match.
            end: Its depth in pages.
            prompt_pages: Number of the row's pages that are its prompt.
        """
        node = deepest
        while node is not locked.node:
            start = end - node.size
            if node.is_shared:
                self._detector.admit(node, locked.account, is_evidence=self._is_evidence(locked))
            elif start < prompt_pages and self._is_evidence(locked):
                upper = node if end <= prompt_pages else self._store.split(node, prompt_pages - start)
                upper.prompt_epoch = self._store.epoch
                self._store.fresh[upper] = None
                node = upper
            end = start
            assert node.parent is not None
            node = node.parent

    def grow(self, locked: LockedPath, node: Node, key: PagedKey, pages: PageIds, prompt_pages: int) -> Node:
        """Insert new pages below `node`; return the node in which they end.

        Args:
            locked: The row's locked path.
            node: The end of the row's path in the tree.
            key: The row's tokens.
            pages: The pages of the key's end.
            prompt_pages: Number of the row's pages that are its prompt.
        """
        start = key.pages - len(pages)
        pinned = self._pins.covered_pages(key) if self._allows_pins else 0
        is_evidence = self._is_user_aware and self._is_evidence(locked)
        begin = start
        for end in self._ends(start, pinned, prompt_pages, key.pages):
            part = pages[begin - start : end - start]
            kind = (is_evidence and pinned < end <= prompt_pages, end <= pinned)
            node = self._add(locked, node, key.slice(begin, end), part, kind)
            begin = end
        return node

    def _ends(self, start: int, pinned: int, prompt_pages: int, end: int) -> Iterable[int]:
        """Return the ends of the nodes that become the pages [start, end): of a pin, of the prompt, and of the key."""
        ends = {end}
        if start < pinned:
            ends.add(pinned)
        if self._is_user_aware and start < prompt_pages:
            ends.add(prompt_pages)
        return ends if len(ends) == 1 else sorted(ends)

    def raise_priority(self, node: Node, priority: int) -> None:
        """Raise the priority of a path to at least `priority`."""
        while node.parent is not None:
            node.priority = max(node.priority, priority)
            node = node.parent

    def _add(self, locked: LockedPath, node: Node, key: bytes, pages: PageIds, kind: tuple[bool, bool]) -> Node:
        is_evidence, is_pinned = kind
        owner = self._store.accounts.public if is_pinned else locked.account
        # Chunks of one prompt become one node, unless another lock or a child needs the boundary.
        if (
            node is locked.node
            and node.lock_ref == 1
            and not (node.children or node.joint or node.host_ref or node.host_pages is not None)
            and node.owner is owner
            and node.prompt_epoch == (self._store.epoch if is_evidence else None)
            and (node.no_promote, node.pinned) == (not (locked.may_promote or is_pinned), is_pinned)
            and node.sessions == (None if is_pinned else locked.sessions)
            and (not is_pinned or self._is_own_work(node, locked))
        ):
            self._store.extend(node, key, pages)
        else:
            parent, node = node, self._store.attach(node, owner, key, pages)
            node.prompt_epoch = self._store.epoch if is_evidence else None
            node.no_promote, node.priority = not (locked.may_promote or is_pinned), locked.priority
            node.sessions = None if is_pinned else locked.sessions
            if is_pinned:
                node.pinned, node.generation = True, parent.generation
                node.creators = self._sole_creator(locked)
        if self._is_user_aware and not is_pinned:
            self._store.fresh[node] = None
        self._store.emit(CacheEventKind.INSERTED, node)
        return node

    def _is_own_work(self, node: Node, locked: LockedPath) -> bool:
        """Whether a public node has no history except that this view has just computed it."""
        is_unused = not (node.hit_cur or node.hit_pre or node.quarantined or node.tenants)
        return is_unused and node.creators == self._sole_creator(locked)

    def _sole_creator(self, locked: LockedPath) -> dict[SubjectKey, Creator]:
        epoch = self._store.epoch
        return {
            locked.account.subject: Creator(
                epoch, locked.account.scope[2:], epoch if self._is_evidence(locked) else None
            )
        }

    def _is_evidence(self, locked: LockedPath) -> bool:
        """Whether this row's prompts are evidence, which those of a tenant that shares nothing are not."""
        return locked.may_promote and locked.account.tenant.sharing is not Sharing.NONE
