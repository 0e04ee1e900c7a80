"""Tracks open transfers and their nodes while the tree is restructured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES
from common.transfers import Transfer, TransferDirection, TransferId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.steps import PageIds
    from common.transfers import PeerPages
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.object_keys import ObjectKeys
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_pages import HostPages


@dataclass(frozen=True, slots=True)
class TransferPart:
    """Pages [first, first + count) of a transfer."""

    first: int
    count: int


@dataclass(slots=True, eq=False, repr=False)
class OpenTransfer:
    """A transfer that not all ranks have acknowledged.

    `end` is the deepest node that it needs; `parts` maps each target node to its pages of the transfer. `held` are
    device pages of nodes that have been removed from the tree meanwhile, to which other nodes may refer, too.
    """

    transfer: Transfer
    end: Node
    parts: dict[Node, TransferPart]
    held: list[PageIds] = field(default_factory=list)

    def in_order(self) -> Iterator[tuple[Node, PageIds, PageIds]]:
        """Yield each node with its pages on device and host, parents first."""
        for node, part in sorted(self.parts.items(), key=lambda item: item[1].first):
            pages = slice(part.first, part.first + part.count)
            yield node, self.transfer.device_pages[pages], self.transfer.host_pages[pages]


@dataclass(slots=True)
class Patience:
    """A wait for room that transfers take up: as long as those are open that were when it began, not for later ones."""

    until: TransferId | None = None

    def lasts(self, ledger: TransferLedger) -> bool:
        """Begin to wait, if that is new, and return whether to wait on."""
        open_ids = [opened.transfer.transfer_id for opened in ledger.all()]
        if self.until is None and open_ids:
            self.until = open_ids[-1]
        return self.until is not None and bool(open_ids) and open_ids[0] <= self.until

    def end(self) -> None:
        """Note that there was room."""
        self.until = None


class TransferLedger:
    """Owns the open transfers and their references on pages of both tiers.

    Every node from the root to a transfer's end counts the transfer in `host_ref`. A node is the target of at most one
    transfer.
    """

    def __init__(self, store: NodeStore, host: HostPages) -> None:
        self._store = store
        self._host = host
        self._open: dict[TransferId, OpenTransfer] = {}
        self._by_node: dict[Node, OpenTransfer] = {}
        self._by_end: dict[Node, dict[OpenTransfer, None]] = {}
        self._next = 1
        # References of open transfers, one per page.
        self.device_references = 0
        self.host_references = 0

    def __len__(self) -> int:
        """Return the number of open transfers."""
        return len(self._open)

    def all(self) -> Iterable[OpenTransfer]:
        """Return the open transfers, oldest first."""
        return self._open.values()

    def get(self, transfer_id: TransferId) -> OpenTransfer | None:
        """Return an open transfer by its id, or None."""
        return self._open.get(transfer_id)

    def about(self, node: Node) -> OpenTransfer | None:
        """Return the transfer of which `node` is a target, or None."""
        return self._by_node.get(node)

    def need(self, end: Node, count: int) -> None:
        """Change by `count` the number of transfers that need the path from the root to `end`."""
        at = end
        while at.parent is not None:
            self._host.add_host_ref(at, count)
            at = at.parent

    def retain_host(self, pages: PageIds) -> None:
        """Add a reference on host pages for a transfer that reads them."""
        self._host.allocator.retain(pages)

    def open(
        self,
        direction: TransferDirection,
        nodes: Sequence[Node],
        pages: tuple[PageIds, PageIds],
        end: Node,
        snapshots: tuple[PageIds, PageIds] = (NO_PAGES, NO_PAGES),
    ) -> Transfer:
        """Start a transfer for the part of the path to `end` that are `nodes`, parents first.

        It takes over one reference on each of `pages`, which are, as are the slots of `snapshots`, those of the device
        and of the host.
        """
        device_pages, host_pages = pages
        transfer = Transfer(
            TransferId(self._next), direction, device_pages, host_pages, device_snapshots=snapshots[0],
            host_snapshots=snapshots[1],
        )  # fmt: skip
        self._next += 1
        parts: dict[Node, TransferPart] = {}
        first = 0
        for node in nodes:
            assert node not in self._by_node
            parts[node] = TransferPart(first, node.size)
            first += node.size
        assert first == len(device_pages) == len(host_pages)
        self._register(OpenTransfer(transfer, end, parts))
        return transfer

    def open_stored(
        self,
        direction: TransferDirection,
        end: Node,
        host_pages: PageIds,
        keys: ObjectKeys,
        host_snapshots: PageIds = NO_PAGES,
    ) -> Transfer:
        """Start a transfer with storage, of pages or of snapshots; it takes over one reference on each page.

        It has no target nodes, but needs the path to `end`: as the source, or as the parent of pages that arrive from
        storage.
        """
        transfer = Transfer(
            TransferId(self._next), direction, host_pages=host_pages, object_keys=keys.names,
            cipher_key=keys.cipher_key, host_snapshots=host_snapshots,
        )  # fmt: skip
        self._next += 1
        self._register(OpenTransfer(transfer, end, {}))
        return transfer

    def open_from_peer(
        self, direction: TransferDirection, end: Node, pages: PageIds, peer: PeerPages, snapshots: PageIds = NO_PAGES
    ) -> Transfer:
        """Start a transfer of another group's pages to `pages` of the host or the device; see `open_stored`.

        Pages on the host will be attached below `end`. `snapshots` are slots of the device for the group's.
        """
        on_device = direction is TransferDirection.PEER_TO_DEVICE
        device_pages, host_pages = (pages, NO_PAGES) if on_device else (NO_PAGES, pages)
        transfer = Transfer(
            TransferId(self._next), direction, device_pages, host_pages, peer=peer, device_snapshots=snapshots
        )
        self._next += 1
        self._register(OpenTransfer(transfer, end, {}))
        return transfer

    def _register(self, opened: OpenTransfer) -> None:
        self._open[opened.transfer.transfer_id] = opened
        self._by_node.update(dict.fromkeys(opened.parts, opened))
        self._by_end.setdefault(opened.end, {})[opened] = None
        self.need(opened.end, 1)
        self.device_references += len(opened.transfer.device_pages)
        self.host_references += len(opened.transfer.host_pages)

    def close(self, opened: OpenTransfer) -> None:
        """End a transfer and release its references."""
        del self._open[opened.transfer.transfer_id]
        for node in opened.parts:
            del self._by_node[node]
        self._forget_end(opened)
        self.need(opened.end, -1)
        for pages in opened.held:
            self._store.use.give_up(pages)
        transfer = opened.transfer
        self.device_references -= len(transfer.device_pages)
        self.host_references -= len(transfer.host_pages)
        self._store.allocator.release(transfer.device_pages)
        self._host.allocator.release(transfer.host_pages)

    def tables(self) -> dict[str, PageIds]:
        """Return the device pages of each open transfer, by a readable name."""
        return {f"transfer {key}": opened.transfer.device_pages for key, opened in self._open.items()}

    # --- the tree changes ---

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split: both halves remain targets of their share."""
        opened = self._by_node.get(node)
        if opened is None:
            return
        part = opened.parts[node]
        opened.parts[upper] = TransferPart(part.first, upper.size)
        opened.parts[node] = TransferPart(part.first + upper.size, part.count - upper.size)
        self._by_node[upper] = opened

    def follow(self, node: Node, other: Node) -> None:
        """Move the end of transfers to another node with the same parent and tokens, whose copy is kept as long."""
        ending = self._by_end.pop(node, {})
        if ending:
            self._host.add_host_ref(other, len(ending))
            self._host.add_host_ref(node, -len(ending))
            for opened in ending:
                opened.end = other
            self._by_end.setdefault(other, {}).update(ending)

    def leave(self, leaf: Node) -> None:
        """Follow a leaf's removal: it is no longer a target, and its transfers end in its parent."""
        opened = self._by_node.pop(leaf, None)
        if opened is not None:
            part = opened.parts.pop(leaf)
            if leaf.joint and np.array_equal(leaf.pages, _cut(opened.transfer.device_pages, part)):
                # Other nodes may still refer to the pages that the transfer reads.
                self._store.use.hold(leaf.pages)
                opened.held.append(leaf.pages)
        parent = leaf.parent
        assert parent is not None
        for ending in self._by_end.pop(leaf, {}):
            ending.end = parent
            self._by_end.setdefault(parent, {})[ending] = None

    def rehang(self, node: Node, old: Node) -> None:
        """Follow a node that has been moved from below `old`."""
        count = node.host_ref
        if count:
            assert node.parent is not None
            self.need(node.parent, count)
            self.need(old, -count)

    def _forget_end(self, opened: OpenTransfer) -> None:
        ending = self._by_end[opened.end]
        del ending[opened]
        if not ending:
            del self._by_end[opened.end]


def _cut(pages: PageIds, part: TransferPart) -> PageIds:
    return pages[part.first : part.first + part.count]
