"""The paged radix tree as a structure: nodes, matching, cutting and growing; it knows no rows, locks or allocators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.interface import NodeId
from services.scheduler.cache.keys import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import PageIds
    from services.scheduler.cache.keys import PagedKey

# Whose view a node is in: (tenant, user), or nothing for what all may see. No principal is the empty tuple.
Scope = tuple[str, ...]
PUBLIC_SCOPE: Scope = ()

# Scope and first page of an edge: one principal's child never takes the place of another's.
ChildKey = tuple[Scope, bytes]


@dataclass(slots=True, eq=False)
class Node:
    """An edge of whole pages and what hangs below it.

    `key` is the edge's tokens as `PagedKey` makes them, `pages` [edge pages] int32, replaced and never written to.
    Only the root has no parent.
    """

    node_id: NodeId
    parent: Node | None
    scope: Scope
    key: bytes
    pages: PageIds
    lock_ref: int = 0
    last_access: int = 0
    children: dict[ChildKey, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """How far a key was found: to the end of `node`, then `partial_pages` into its child `partial`, if that is set."""

    node: Node
    node_pages: int
    partial: Node | None = None
    partial_pages: int = 0

    @property
    def pages(self) -> int:
        """Pages found, counted from the start of the key."""
        return self.node_pages + self.partial_pages


class PageTree:
    """Owns the nodes below one root, which itself holds no pages."""

    def __init__(self, page_size: int) -> None:
        """Start with nothing but the root."""
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.node_count = 0
        self._next_id = 0
        self.root = self._make(None, PUBLIC_SCOPE, b"", np.empty(0, np.int32))

    def match(self, node: Node, scope: Scope, key: PagedKey, first: int, end: int) -> Match:
        """Find the longest path of `scope` below `node` that holds the pages [first, end) of `key`; changes nothing."""
        while first < end:
            child = node.children.get((scope, key.page(first)))
            if child is None:
                break
            common = key.common_pages(child.key, first, end)
            if common < len(child.pages):
                return Match(node, first, child, common)
            node = child
            first += common
        return Match(node, first)

    def split(self, node: Node, pages: int) -> Node:
        """Cut an edge after `pages` pages; return the new upper half.

        The lower half remains the same object with the same end, so that whoever holds it holds as many tokens as
        before.
        """
        assert 0 < pages < len(node.pages)
        parent = node.parent
        assert parent is not None
        cut = pages * self.page_bytes
        upper = self._make(parent, node.scope, node.key[:cut], node.pages[:pages])
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        parent.children[self._child_key(upper)] = upper
        node.key = node.key[cut:]
        node.pages = _frozen(node.pages[pages:])
        node.parent = upper
        upper.children[self._child_key(node)] = node
        self.node_count += 1
        return upper

    def attach(self, parent: Node, scope: Scope, key: bytes, pages: PageIds) -> Node:
        """Hang a new leaf below `parent`."""
        node = self._make(parent, scope, key, pages)
        child_key = self._child_key(node)
        assert child_key not in parent.children, "the tree has a child with this scope and page"
        parent.children[child_key] = node
        self.node_count += 1
        return node

    def extend(self, leaf: Node, key: bytes, pages: PageIds) -> None:
        """Lengthen a leaf's edge at its end."""
        assert not leaf.children
        leaf.key += key
        leaf.pages = _frozen(np.concatenate([leaf.pages, pages]))

    def trim(self, leaf: Node, pages: int) -> PageIds:
        """Cut the last `pages` pages off a leaf, but not all; return them."""
        assert not leaf.children
        assert 0 < pages < len(leaf.pages)
        kept = len(leaf.pages) - pages
        dropped = leaf.pages[kept:]
        leaf.key = leaf.key[: kept * self.page_bytes]
        leaf.pages = _frozen(leaf.pages[:kept])
        return dropped

    def detach(self, leaf: Node) -> PageIds:
        """Take a leaf out of the tree; return its pages, which leaves it with none."""
        assert not leaf.children
        assert leaf.parent is not None
        del leaf.parent.children[self._child_key(leaf)]
        self.node_count -= 1
        dropped = leaf.pages
        leaf.key, leaf.pages = b"", dropped[:0]
        return dropped

    def path_pages(self, node: Node, above: Node) -> PageIds:
        """Return the pages from below `above`, an ancestor, to the end of `node`."""
        parts = [node.pages[:0]]
        while node is not above:
            parts.append(node.pages)
            assert node.parent is not None
            node = node.parent
        return np.concatenate(parts[::-1])

    def depth_pages(self, node: Node) -> int:
        """Return the number of pages from the root to the end of `node`."""
        depth = 0
        at: Node | None = node
        while at is not None:
            depth += len(at.pages)
            at = at.parent
        return depth

    def walk(self) -> Iterator[tuple[Node, int]]:
        """Yield every node but the root with its depth in pages, parents before children, in order of insertion."""
        stack = [(child, 0) for child in reversed(self.root.children.values())]
        while stack:
            node, above = stack.pop()
            depth = above + len(node.pages)
            yield node, depth
            stack.extend((child, depth) for child in reversed(node.children.values()))

    def _make(self, parent: Node | None, scope: Scope, key: bytes, pages: PageIds) -> Node:
        node = Node(NodeId(self._next_id), parent, scope, key, _frozen(pages))
        self._next_id += 1
        return node

    def _child_key(self, node: Node) -> ChildKey:
        return node.scope, node.key[: self.page_bytes]


def _frozen(pages: PageIds) -> PageIds:
    """Return a read-only copy: views would keep what they were cut from alive."""
    copy = pages.copy()
    copy.flags.writeable = False
    return copy
