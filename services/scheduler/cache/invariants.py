"""What must hold of a radix cache after every operation: tests check it always, a running scheduler may sample it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.tree import PUBLIC_SCOPE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.cache.radix import RadixCache
    from services.scheduler.cache.tree import Node


def violations(cache: RadixCache) -> list[str]:
    """Return what is wrong with the tree, nothing if all is well. O(nodes and pages)."""
    found = [*_totals(cache), *_recency(cache)]
    for node, _ in cache.tree.walk():
        found.extend(_structure(cache, node))
    return found


def _structure(cache: RadixCache, node: Node) -> Iterator[str]:
    parent = node.parent
    if parent is None:
        yield f"node {node.node_id} hangs nowhere"
        return
    page = node.key[: cache.tree.page_bytes]
    if parent.children.get((node.scope, page)) is not node:
        yield f"node {node.node_id} is not found under its own scope and first page"
    if len(node.pages) == 0 or len(node.key) != len(node.pages) * cache.tree.page_bytes:
        yield f"node {node.node_id} has {len(node.key)} key bytes for {len(node.pages)} pages"
    if parent is not cache.tree.root and parent.scope not in (node.scope, PUBLIC_SCOPE):
        yield f"node {node.node_id} of {node.scope} hangs below {parent.scope}"
    if node.scope != PUBLIC_SCOPE and (PUBLIC_SCOPE, page) in parent.children:
        yield f"node {node.node_id} has a public sibling with the same first page"
    if node.lock_ref < 0:
        yield f"node {node.node_id} is locked {node.lock_ref} times"
    if parent is not cache.tree.root and parent.lock_ref < node.lock_ref:
        yield f"node {node.node_id} is locked more often than its parent"
    if parent is not cache.tree.root and parent.last_access < node.last_access:
        yield f"node {node.node_id} was used after its parent"
    if (node.lock_ref == 0) != (node in cache.locks.unlocked):
        yield f"node {node.node_id} with lock_ref {node.lock_ref} is on the wrong side of `unlocked`"


def _totals(cache: RadixCache) -> Iterator[str]:
    nodes = [node for node, _ in cache.tree.walk()]
    evictable = sum(len(node.pages) for node in nodes if node.lock_ref == 0)
    protected = sum(len(node.pages) for node in nodes if node.lock_ref > 0)
    if (evictable, protected) != (cache.evictable_pages, cache.protected_pages):
        yield f"{evictable} + {protected} pages, counted {cache.evictable_pages} + {cache.protected_pages}"
    if len(nodes) != cache.tree.node_count:
        yield f"{len(nodes)} nodes, counted {cache.tree.node_count}"
    pages = [page for node in nodes for page in node.pages.tolist()]
    if len(pages) != len(set(pages)):
        yield "a page is in two nodes"
    if set(cache.locks.unlocked) - set(nodes):
        yield "`unlocked` holds nodes that are not in the tree"


def _recency(cache: RadixCache) -> Iterator[str]:
    seen: set[Node] = set()
    last_access = 0
    for node in cache.locks.unlocked:
        if not seen.issuperset(node.children.values()):
            yield f"node {node.node_id} would be evicted before its children"
        if node.last_access < last_access:
            yield f"node {node.node_id} stands behind one used later"
        seen.add(node)
        last_access = node.last_access
