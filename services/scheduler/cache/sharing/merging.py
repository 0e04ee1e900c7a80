"""Shrinks the tree without changing any view: chains are joined into one node, equal pages are merged into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.keys import common_run
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.cache.node import Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tree import PageTree

# A position in a subtree: a node, and a number of its pages.
_Cursor = tuple["Node", int]


def merge_private_subtree(store: NodeStore, groups: Iterable[tuple[Node, bytes]]) -> list[Node]:
    """Join chains, and merge equal private pages of different owners; at a boundary only.

    Args:
        store: The nodes.
        groups: Parent and first page of subtrees that have grown and are not public.

    Returns:
        Nodes that were in use and could not be repointed, for another attempt.
    """
    compress_chains(store)
    if store.config.strict_numerics:
        return []
    missed: list[Node] = []
    for parent, page in groups:
        if not parent.is_dead:
            members = [(member, 0) for member in store.tree.group(parent, page)]
            members += _elsewhere(store, parent, page)
            members = [cursor for cursor in members if cursor[0].state is not NodeState.ON_HOST]
            _merge_pages(store, members[-store.config.merge_group_limit :], missed)
    return missed


def _elsewhere(store: NodeStore, parent: Node, page: bytes) -> list[_Cursor]:
    """Return the positions outside of a TENANT node's tenant where `page` follows the node's tokens."""
    tree = store.tree
    if parent.is_public:
        return []
    key, top = parent.key, parent
    while top.parent is not None and top.parent.owner is parent.owner:
        top = top.parent
        key = top.key + key
    assert top.parent is not None, "the root is public"
    found: list[_Cursor] = []
    for other in tree.group(top.parent, key[: tree.page_bytes]):
        if other is not top:
            found.extend(_places(tree, other, key, page))
    return found


def _places(tree: PageTree, node: Node, key: bytes, page: bytes) -> Iterable[_Cursor]:
    """Return the positions where `page` follows `key`, matched from the start of `node` along its owner's nodes."""
    while len(node.key) < len(key):
        if not key.startswith(node.key):
            return []
        key = key[len(node.key) :]
        followers = tree.group(node, key[: tree.page_bytes])
        following = next((child for child in followers if child.owner is node.owner), None)
        if following is None:
            return []
        node = following
    if not node.key.startswith(key):
        return []
    if len(node.key) == len(key):
        return [(child, 0) for child in tree.group(node, page)]
    return [(node, len(key) // tree.page_bytes)] if node.key.startswith(page, len(key)) else []


def compress_chains(store: NodeStore) -> None:
    """Join each node whose only child is equal in everything but its tokens with this child."""
    loose, store.loose = store.loose, {}
    for node in loose:
        upper = node
        while upper.parent is not None and not upper.is_dead and (child := _only_equal_child(store, upper)) is not None:
            store.absorb_child(upper, child)
            upper = child


def _only_equal_child(store: NodeStore, node: Node) -> Node | None:
    """Return the child that a node can be joined with: no row ends between them, and their histories are equal."""
    if len(node.children) != 1:
        return None
    children = store.tree.children(node)
    if len(children) != 1 or node.is_soft_free or children[0].state is not node.state:
        return None
    child = children[0]
    is_equal = (
        node.owner is child.owner
        and node.lock_ref == child.lock_ref
        and not (node.host_ref or child.host_ref)
        and node.last_access == child.last_access
        and node.prompt_epoch == child.prompt_epoch
        and (node.priority, node.pinned, node.no_promote) == (child.priority, child.pinned, child.no_promote)
        and node.sessions == child.sessions
        and (node.generation, node.uses, node.promoted) == (child.generation, child.uses, child.promoted)
        and (node.creators, node.quarantined) == (child.creators, child.quarantined)
        and (node.tenants, node.parties) == (child.tenants, child.parties)
        and (node.hit_cur, node.hit_pre, node.u_pre) == (child.hit_cur, child.hit_pre, child.u_pre)
        # Two counts of equal size might be of different subjects.
        and node.hit_cur == 0
        and (node.host_pages is None) == (child.host_pages is None)
    )
    return child if is_equal else None


def _merge_pages(store: NodeStore, members: list[_Cursor], missed: list[Node]) -> None:
    """Walk subtrees side by side; where tokens agree, repoint all to the pages of one."""
    stack = [members]
    while stack:
        cursors = stack.pop()
        if len(cursors) < 2 or cursors[0][0].is_public:
            continue
        pages = common_run([_rest(store, cursor) for cursor in cursors], store.tree.page_bytes)
        # A node in use cannot change its pages, so the others take over its pages.
        cursors.sort(key=lambda cursor: (cursor[0].is_soft_free, -cursor[0].lock_ref, cursor[0].node_id))
        for cursor in cursors[1:]:
            _repoint(store, cursor, cursors[0], pages, missed)
        stack.extend(_followers(store, cursors, pages))


def _rest(store: NodeStore, cursor: _Cursor) -> bytes:
    node, offset = cursor
    return node.key[offset * store.tree.page_bytes :]


def _repoint(store: NodeStore, cursor: _Cursor, canonical: _Cursor, pages: int, missed: list[Node]) -> None:
    (node, offset), (source, start) = cursor, canonical
    wanted = source.pages[start : start + pages]
    if np.array_equal(node.pages[offset : offset + pages], wanted):
        return
    if node.lock_ref or node.host_ref:
        missed.append(node)
        return
    store.use.make_joint(source)
    store.use.make_joint(node)
    changed = node.pages.copy()
    changed[offset : offset + pages] = wanted
    store.set_pages(node, changed)
    store.emit(CacheEventKind.MERGED, node)


def _followers(store: NodeStore, cursors: list[_Cursor], pages: int) -> Iterable[list[_Cursor]]:
    """Return the positions that follow a common run, grouped by next page."""
    by_page: dict[bytes, list[_Cursor]] = {}
    for node, offset in cursors:
        ends = offset + pages
        children = [(child, 0) for child in store.tree.children(node) if child.state is not NodeState.ON_HOST]
        for follower in [(node, ends)] if ends < len(node.pages) else children:
            by_page.setdefault(_rest(store, follower)[: store.tree.page_bytes], []).append(follower)
    return by_page.values()
