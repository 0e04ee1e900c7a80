"""Invariants of a radix cache after every operation: tests check all of them, a running scheduler samples them.

The numbers are those of the specification. Number 4, that a page's references are its holders, is `audit.audit`;
numbers 9 and 10, evidence and determinism, are properties of operations and not of a state.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING

from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from services.scheduler.cache.eviction import EvictionQueue
    from services.scheduler.cache.eviction_order import C
    from services.scheduler.cache.node import Account, Holder, Node
    from services.scheduler.cache.radix import RadixCache
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_tier import HostTier

_LIVE, _ON_HOST = NodeState.LIVE, NodeState.ON_HOST


def violations(cache: RadixCache) -> list[str]:
    """Return the violations in the tree; empty if there are none. O(nodes and pages)."""
    nodes = [node for node, _ in cache.store.tree.walk()]
    found = [*_totals(cache, nodes), *_accounts(cache, nodes), *_queue(cache, nodes), *_soft(cache, nodes)]
    if cache.host is not None:
        found.extend(host_violations(cache.store, cache.host))
    for node in nodes:
        found.extend(node_violations(cache, node))
        found.extend(_children(cache, node))
    return found


def node_violations(cache: RadixCache, node: Node) -> list[str]:
    """Return the violations of a node and its parent. O(pages of the node)."""
    return [*_place(cache, node), *_knowledge(node), *_use(cache, node)]


def _place(cache: RadixCache, node: Node) -> Iterator[str]:
    """Numbers 1 to 3: allowed parents and siblings."""
    tree, parent, name = cache.store.tree, node.parent, f"node {node.node_id}"
    if parent is None:
        yield f"{name} hangs nowhere"
        return
    entry = parent.children.get(tree.first_page(node))
    if (entry.get(node.owner) if isinstance(entry, dict) else entry) is not node:
        yield f"{name} is not found under its own owner and first page"
    if node.size == 0 or len(node.key) != node.size * tree.page_bytes:
        yield f"{name} has {len(node.key)} key bytes for {node.size} pages"
    if not (parent.is_public or parent.owner in (node.owner, node.owner.tenant)):
        yield f"{name} of {node.owner_id} hangs below one of {parent.owner_id}"
    if isinstance(entry, dict) and cache.store.accounts.public in entry:
        yield f"{name} has a public sibling with the same first page, or is one"
    if isinstance(entry, dict) and not node.is_shared and node.owner.tenant in entry:
        yield f"{name} has a sibling of its tenant with the same first page"


def _knowledge(node: Node) -> Iterator[str]:
    """Fields that only nodes of some levels may have."""
    name = f"node {node.node_id}"
    if node.is_shared and node.prompt_epoch is not None:
        yield f"{name} is shared and still evidence"
    if not node.is_shared and (node.creators or node.quarantined or node.hit_cur):
        yield f"{name} is PRIVATE and counts others"
    if not node.is_public and (node.parties or node.tenants):
        yield f"{name} is not PUBLIC and counts tenants"
    if not node.is_public and any(subject[0] != node.owner_id[0] for subject in node.creators or ()):
        yield f"{name} of {node.owner_id} knows creators of other tenants"


def _use(cache: RadixCache, node: Node) -> Iterator[str]:
    """Numbers 5, 7 and 8: locks, residence, counters."""
    parent, root, name = node.parent, cache.store.tree.root, f"node {node.node_id}"
    if node.lock_ref < 0:
        yield f"{name} is locked {node.lock_ref} times"
    if node.lock_ref and node.is_soft_free:
        yield f"{name} is locked and counts as free"
    if parent is not None and parent is not root:
        if parent.lock_ref < node.lock_ref:
            yield f"{name} is locked more often than its parent"
        if parent.last_access < node.last_access:
            yield f"{name} was used after its parent"
        if parent.state is not NodeState.LIVE and node.state is NodeState.LIVE:
            yield f"{name} is LIVE below a parent that is not"
    if node.hit_cur < node.distinct_users or (node.u_cnt_l is not None and node.hit_cur == 0):
        yield f"{name} counts more users than hits"
    parties = (node.parties or {}).values()
    if node.is_public and node.hit_cur != sum(window.hits for window in parties):
        yield f"{name} counts {node.hit_cur} hits, and not as many of all tenants"
    if node.epoch > cache.epoch:
        yield f"{name} is of a later epoch than the cache"


def _children(cache: RadixCache, node: Node) -> Iterator[str]:
    name, children = f"node {node.node_id}", cache.store.tree.children(node)
    if node.live_children != sum(child.state is NodeState.LIVE for child in children):
        yield f"{name} miscounts its LIVE children"


def _totals(cache: RadixCache, nodes: list[Node]) -> Iterator[str]:
    """Number 6, and that pages of several nodes are marked joint."""
    named = Counter(page for node in nodes for page in node.pages.tolist())
    joint = {page for node in nodes if node.joint for page in node.pages.tolist()}
    held = set(_held_pages(cache)) & joint
    needed = [node for node in nodes if node.lock_ref or node.host_ref]
    protected = {page for node in needed for page in node.pages.tolist()} | held
    live = {page for node in nodes if not node.is_soft_free for page in node.pages.tolist()} - protected
    expected = (len(live), len(protected), len(named) - len(live) - len(protected))
    counted = (cache.evictable_pages, cache.protected_pages, cache.soft_free_pages)
    if expected != counted:
        yield f"{expected} pages evictable, protected and soft-free, counted {counted}"
    if named.total() != cache.held_references:
        yield f"{named.total()} page references, counted {cache.held_references}"
    if any(count > 1 and page not in joint for page, count in named.items()):
        yield "a page is in two nodes that are not joint"
    if any(page in joint for node in nodes if not node.joint for page in node.pages.tolist()):
        yield "a page of a joint node is in one that is not"
    if len(nodes) != cache.store.tree.node_count:
        yield f"{len(nodes)} nodes, counted {cache.store.tree.node_count}"


def _held_pages(cache: RadixCache) -> Iterator[int]:
    """Yield the pages of removed nodes that rows still use, or that open transfers read."""
    for locked in cache.locks.all():
        if locked.held is not None:
            yield from locked.held.tolist()
    for opened in cache.host.ledger.all() if cache.host is not None else ():
        for pages in opened.held:
            yield from pages.tolist()


def _accounts(cache: RadixCache, nodes: list[Node]) -> Iterator[str]:
    everyone = cache.store.accounts
    accounts: dict[Account, list[Node]] = {
        account: [] for account in (everyone.public, *everyone.tenants(), *everyone.all())
    }
    for node in nodes:
        if node.owner not in accounts:
            yield f"node {node.node_id} is of an owner without account"
            continue
        accounts[node.owner].append(node)
    yield from _holders(list(accounts))
    snapshots = Counter(entry.owner for pool in _snapshot_pools(cache) for entry in pool.all())
    yield from (f"a snapshot is of {owner.scope}, which has no account" for owner in snapshots if owner not in accounts)
    for account, owned in accounts.items():
        live = sum(len(node.pages) for node in owned if not node.is_soft_free)
        if (len(owned), live) != (account.nodes, account.live_pages):
            yield f"{account.scope} has {len(owned)} nodes, {live} pages, counted {account.nodes}, {account.live_pages}"
        tops = {node for node in owned if not node.is_public and node.parent and node.parent.owner is not account}
        if tops != set(account.tops):
            yield f"{account.scope} has other tops than counted"
        views = sum(other.tenant is account for other in everyone.all()) if account.is_shared else 0
        if views != account.views:
            yield f"{account.scope} has {views} views, counted {account.views}"
        if snapshots[account] != account.snapshots:
            yield f"{account.scope} has {snapshots[account]} snapshots, counted {account.snapshots}"
        if not (account.is_public or owned or account.snapshots or account.locks or views):
            yield f"{account.scope} has an account and nothing in it"


def _snapshot_pools(cache: RadixCache) -> Iterator[StateSnapshots]:
    """Yield the snapshots of recurrent states of each tier."""
    if cache.snapshots is not None:
        yield cache.snapshots
    if cache.host is not None and cache.host.states is not None:
        yield cache.host.states.host


def _holders(accounts: list[Account]) -> Iterator[str]:
    """Check that each account counts for one subject, and each subject for one tenant."""
    views = Counter(account.holder for account in accounts if not account.is_public)
    for holder, members in views.items():
        if holder.members != members:
            yield f"{holder.scope} has {members} accounts, counted {holder.members}"
    for tenant, members in Counter(holder.tenant for holder in views).items():
        if tenant.members != members:
            yield f"tenant {tenant.scope} has {members} subjects, counted {tenant.members}"
    if len({holder.scope for holder in views}) != len(views):
        yield "a subject is counted twice"


def _queue(cache: RadixCache, nodes: list[Node]) -> Iterator[str]:
    """Check that exactly the evictable nodes have one valid entry each, and the next victim is the right one."""
    live: Counter[Holder] = Counter()
    for node in nodes:
        if node.state is NodeState.LIVE:
            live.update({node.owner.holder: len(node.pages), node.owner.holder.tenant: len(node.pages)})
    candidates = {
        node
        for node in nodes
        if node.state is NodeState.LIVE and not (node.lock_ref or node.host_ref or node.live_children)
    }
    yield from queue_violations(cache.store.queue, live, candidates)


def _soft(cache: RadixCache, nodes: list[Node]) -> Iterator[str]:
    if set(cache.store.soft) != {node for node in nodes if node.is_soft_free}:
        yield "the soft-free list holds other nodes than the tree"
    seen: set[Node] = set()
    for node in cache.store.soft:
        on_device = (child for child in cache.store.tree.children(node) if child.state is not NodeState.ON_HOST)
        if not seen.issuperset(on_device):
            yield f"node {node.node_id} would be reclaimed before its children"
        seen.add(node)


def host_violations(store: NodeStore, host: HostTier) -> list[str]:
    """Return the violations in the host tier; the numbers are those of the specification. O(nodes and pages)."""
    nodes = [node for node, _ in store.tree.walk()]
    found = [
        *_host_pages(host, nodes),
        *_transfers(host, nodes),
        *_holds(host),
        *_host_queue(host, nodes),
        *_host_shares(host, nodes),
        *_unplaced(host),
    ]
    for node in nodes:
        found.extend(_host_node(store, node))
    return found


def _host_node(store: NodeStore, node: Node) -> Iterator[str]:
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


def _host_pages(host: HostTier, nodes: list[Node]) -> Iterator[str]:
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


def _unplaced(host: HostTier) -> Iterator[str]:
    if any(node.is_dead for node in host.unplaced()):
        yield "a snapshot waits for a slot on the host with a node that is gone"


def _holds(host: HostTier) -> Iterator[str]:
    """Check what is counted of the paths that are held."""
    counted: Counter[Node] = Counter()
    for hold in host.pages.holds():
        pages, at = 0, hold.node
        while at is not None and at.parent is not None:
            counted[at] += 1
            pages, at = pages + at.size, at.parent
        if pages != hold.pages:
            yield f"a hold keeps {pages} pages, counted {hold.pages}"
    if counted != host.pages.counted_holds():
        yield "nodes are held by other numbers of holds than counted"
    held = sum(node.size for node in counted if not node.host_ref)
    if held != host.pages.held:
        yield f"{held} pages are held alone, counted {host.pages.held}"


def _host_queue(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    held = host.pages.held_nodes()
    if any(node.is_dead or node.host_pages is None for node in held):
        yield "a copy is held that is not there"
    copies = [node for node in nodes if node.host_pages is not None and node not in held]
    can_go = {node for node in copies if not (node.host_ref or node.host_children)}
    if can_go != host.pages.candidates():
        yield "the host's eviction queue holds other nodes than can go"
    copied: Counter[Holder] = Counter()
    for node in nodes:
        if node.host_pages is not None:
            copied.update({node.owner.holder: node.size, node.owner.holder.tenant: node.size})
    for wrong in queue_violations(host.pages.queue, copied, {host.pages.entry(node) for node in can_go}):
        yield f"host: {wrong}"


def _host_shares(host: HostTier, nodes: list[Node]) -> Iterator[str]:
    for owner in {node.owner for node in nodes}:
        pages = sum(node.size for node in nodes if node.owner is owner and node.host_pages is not None)
        if pages != host.pages.pages_of(owner):
            yield f"{owner.scope} has {pages} host pages, counted {host.pages.pages_of(owner)}"


def queue_violations(queue: EvictionQueue[C], pages: Mapping[Holder, int], candidates: Set[C]) -> Iterator[str]:
    """Yield the faults of a queue that should count `pages` and hold exactly `candidates`. O(nodes)."""
    counted = queue.holders()
    expected = {holder: number for holder, number in pages.items() if number}
    if counted != expected:
        shown = [{holder.scope: number for holder, number in each.items()} for each in (expected, counted)]
        yield f"subjects and tenants have {shown[0]} pages, counted {shown[1]}"
    places = list(queue.places())
    if len(places) != len(candidates) or {candidate for _, candidate in places} != candidates:
        yield f"{len(candidates)} nodes can be evicted, and the eviction queue has {len(places)} entries"
        return
    first = queue.first()
    if first is not min(places, key=itemgetter(0), default=(None, None))[1]:
        yield f"the eviction queue takes one of {first and first.owner.scope} first, which is not the most urgent"
