"""Events that the cache reports to the tiers below the device, and a null object for caches without such tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.steps import PageIds
    from common.types import Subject
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Account, Holder, Node


class TierObserver(Protocol):
    """Follows changes of the tree, each within the operation that makes it."""

    def keep(self, node: Node, host_pages: PageIds) -> None:
        """Set a new node's copy to `host_pages`, with a reference on each."""

    def note(self, node: Node) -> None:
        """Follow an unlocked node's use, or its soft-freeing."""

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split; `upper` is the new upper half."""

    def absorb(self, node: Node, child: Node) -> None:
        """Follow the joining of a node with its only child, which remains."""

    def rehang(self, node: Node, old: Node) -> None:
        """Follow a node that was moved from below `old`."""

    def take_over(self, node: Node, other: Node) -> None:
        """Pass on a node's copy before its removal to `other`, which has the same parent and tokens."""

    def hand_over(self, node: Node) -> None:
        """Follow a change of owner."""

    def leave(self, leaf: Node) -> None:
        """Drop the copy of a leaf that is about to be removed."""

    def strip(self, top: Node) -> None:
        """Drop the copies of a subtree that is about to change owners: only device pages are passed on."""

    def restore(self, above: Node, account: Account, key: PagedKey, first: int, pages: PageIds) -> None:
        """Make nodes that are on the host only LIVE on the pages [first, key.pages) that a row has computed."""

    def flush(self) -> int:
        """Drop all copies that no transfer needs; return the number of host pages that became free."""

    def begin_epoch(self, epoch: int, idle: Sequence[Holder]) -> None:
        """Follow the epoch, and the subjects and tenants that are no longer active."""

    def pages_of(self, account: Account) -> int:
        """Return the number of an owner's host pages."""

    def revoke(self, account: Account) -> None:
        """Destroy the storage key of a tenant or the public, as some of its shared pages turned out to be private."""

    def distrust(self, fingerprints: Iterable[int]) -> None:
        """Follow the quarantine of subjects."""

    def forget(self, subject: Subject, accounts: Iterable[Account]) -> None:
        """Destroy the storage key of a subject; `accounts` are those of its views in memory."""

    def renew(self, accounts: Iterable[Account]) -> None:
        """Store the remaining pages of these owners under new keys."""


class NoTier:
    """Implements `TierObserver` for a cache on the device only."""

    def keep(self, node: Node, host_pages: PageIds) -> None:
        raise AssertionError("nothing is copied without a host tier")

    def note(self, node: Node) -> None:
        return

    def split(self, node: Node, upper: Node) -> None:
        return

    def absorb(self, node: Node, child: Node) -> None:
        return

    def rehang(self, node: Node, old: Node) -> None:
        return

    def take_over(self, node: Node, other: Node) -> None:
        return

    def hand_over(self, node: Node) -> None:
        return

    def leave(self, leaf: Node) -> None:
        return

    def strip(self, top: Node) -> None:
        return

    def restore(self, above: Node, account: Account, key: PagedKey, first: int, pages: PageIds) -> None:
        return

    def flush(self) -> int:
        return 0

    def begin_epoch(self, epoch: int, idle: Sequence[Holder]) -> None:
        return

    def pages_of(self, account: Account) -> int:
        return 0

    def revoke(self, account: Account) -> None:
        return

    def distrust(self, fingerprints: Iterable[int]) -> None:
        return

    def forget(self, subject: Subject, accounts: Iterable[Account]) -> None:
        return

    def renew(self, accounts: Iterable[Account]) -> None:
        return
