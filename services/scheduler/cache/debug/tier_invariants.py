"""Invariants of the host tier after every operation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from services.scheduler.cache.debug.queue_invariants import queue_violations
from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.cache.node import Holder, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_tier import HostTier

_LIVE, _ON_HOST = NodeState.LIVE, NodeState.ON_HOST


def host_violations(store: NodeStore, host: HostTier) -> list[str]:
    """Return the violations in the host tier; the numbers are those of the specification. O(nodes and pages)."""
    nodes = [node for node, _ in store.tree.walk()]
    found = [*_pages(host, nodes), *_transfers(host, nodes), *_queue(host, nodes), *_shares(host, nodes)]
    for node in nodes:
        found.extend(_node(store, node))
    return found


def _node(store: NodeStore, node: Node) -> Iterator[str]:
    """Number 7: the nodes on a tier are closed under ancestors."""
    parent, name = node.parent, f"node {node.node_id}"
    assert parent is not None
    if (node.state is _ON_HOST) != (len(node.pages) == 0):
        yield f"{name} is {node.state.value} with {len(node.pages)} device pages"
    if node.state is _ON_HOST and (node.lock_ref or node.host_pages is None):
        yield f"{name} is on the host alone, locked {node.lock_ref} times, copied: {node.host_pages is not None}"
    if node.host_pages is not None and len(node.host_pages) != len(node.key) // store.tree.page_bytes:
        yield f"{name} has {len(node.host_pages)} host pages"
    if parent is not store.tree.root:
        if node.host_pages is not None and parent.host_pages is None:
            yield f"{name} has a copy on the host and its parent has none"
        if node.state is not _ON_HOST and parent.state is _ON_HOST:
            yield f"{name} is on the device and its parent is not"
        if node.host_ref > parent.host_ref:
            yield f"{name} is needed by more transfers than its parent"
    if node.host_ref and node.is_soft_free:
        yield f"{name} is needed by transfers and counts as free"
    copied = sum(child.host_pages is not None for child in store.tree.children(node))
    if node.host_children != copied:
        yield f"{name} has {copied} children on the host, counted {node.host_children}"


def _pages(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    """Numbers 4 and 6 on the host."""
    named = Counter(page for node in nodes if node.host_pages is not None for page in node.host_pages.tolist())
    if any(count > 1 for count in named.values()):
        yield "a host page belongs to two nodes"
    expected = named.copy()
    for opened in host.ledger.all():
        expected.update(opened.transfer.host_pages.tolist())
    free_to_go = [node for node in nodes if node.host_pages is not None and not node.host_ref]
    if any(host.pages.allocator.counts[node.host_pages].max() > 1 for node in free_to_go):
        yield "a copy counts as evictable and is held by a transfer"
    counts = {page: count for page, count in enumerate(host.pages.allocator.counts.tolist()) if count}
    if counts != dict(expected):
        yield f"host pages are referenced {counts}, named {dict(expected)}"
    needed = sum(node.size for node in nodes if node.host_pages is not None and node.host_ref)
    if (named.total(), needed) != (host.pages.references, host.pages.needed):
        yield f"{named.total()} host pages, {needed} needed; counted {host.pages.references}, {host.pages.needed}"
    accounts = host.account()
    if not accounts.is_exact or not host.pages.allocator.is_consistent():
        yield f"the host's accounts are wrong: {accounts}"


def _transfers(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    """Number 4 for transfers: `host_ref` counts the transfers that end in a node or below it."""
    needed: Counter[Node] = Counter()
    for opened in host.ledger.all():
        if opened.end.is_dead:
            yield f"transfer {opened.transfer.transfer_id} ends in a dead node"
        at = opened.end
        while at.parent is not None:
            needed[at] += 1
            at = at.parent
        for node, device_pages, _ in opened.in_order():
            if node.is_dead or len(device_pages) != node.size:
                yield f"transfer {opened.transfer.transfer_id} brings {len(device_pages)} pages to {node.node_id}"
            if host.ledger.about(node) is not opened:
                yield f"node {node.node_id} does not know what transfer it awaits"
    for node in nodes:
        if node.host_ref != needed[node]:
            yield f"node {node.node_id} is needed by {needed[node]} transfers, counted {node.host_ref}"


def _queue(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    can_go = {node for node in nodes if node.host_pages is not None and not (node.host_ref or node.host_children)}
    if can_go != host.pages.candidates():
        yield "the host's eviction queue holds other nodes than can go"
    copied: Counter[Holder] = Counter()
    for node in nodes:
        if node.host_pages is not None:
            copied.update({node.owner.holder: node.size, node.owner.holder.tenant: node.size})
    for wrong in queue_violations(host.pages.queue, copied, {host.pages.entry(node) for node in can_go}):
        yield f"host: {wrong}"


def _shares(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    for owner in {node.owner for node in nodes}:
        pages = sum(node.size for node in nodes if node.owner is owner and node.host_pages is not None)
        if pages != host.pages.pages_of(owner):
            yield f"{owner.scope} has {pages} host pages, counted {host.pages.pages_of(owner)}"
