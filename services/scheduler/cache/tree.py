"""The paged radix tree as a data structure: nodes, matching, splitting and extending; no rows, locks or allocators."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from services.scheduler.cache.keys import TOKEN_BYTES
from services.scheduler.cache.node import Node
from services.scheduler.cache.types import NodeId, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import PageIds
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Account

_LIVE, _ON_HOST = NodeState.LIVE, NodeState.ON_HOST


class Reach(Flag):
    """Options of a match. COMPUTED: the viewer has computed the pages itself, so quarantines do not apply.

    HOST: also match nodes that are only on the host.
    """

    COMPUTED = auto()
    HOST = auto()


NORMAL = Reach(0)


class PrefixMatch(NamedTuple):
    """Result of a match: up to the end of `node`, then `partial_pages` into its child `partial`, if that is set."""

    node: Node
    node_pages: int
    partial: Node | None = None
    partial_pages: int = 0

    @property
    def pages(self) -> int:
        """Matched pages, counted from the start of the key."""
        return self.node_pages + self.partial_pages


class PageTree:
    """Owns the nodes below one root, which itself holds no pages."""

    def __init__(self, page_size: int, public: Account) -> None:
        """Start with only the root, which belongs to `public`."""
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.node_count = 0
        self._next_id = 0
        self._public = public
        self.root = self._make(None, public, b"", np.empty(0, np.int32))

    def match(
        self, node: Node, viewer: Account, key: PagedKey, first: int, end: int, reach: Reach = NORMAL
    ) -> PrefixMatch:
        """Find the longest path in the view of `viewer` below `node` that matches the pages [first, end) of `key`.

        Changes nothing.
        """
        tenant = viewer.tenant
        while first < end:
            child = node.children.get(key.page(first))
            if child is None:
                break
            if isinstance(child, dict):
                child = child.get(viewer) or child.get(tenant)
                if child is None:
                    break
            owner = child.owner
            if owner is not viewer:
                if owner is not tenant and owner is not self._public:
                    break
                if child.quarantined is not None and Reach.COMPUTED not in reach and child.is_hidden_from(viewer):
                    break
            if child.state is _ON_HOST and Reach.HOST not in reach:
                break
            common = key.common_pages(child.key, first, end)
            if common * self.page_bytes < len(child.key):
                return PrefixMatch(node, first, child, common)
            node = child
            first += common
        return PrefixMatch(node, first)

    def continuation(self, viewer: Account, key: PagedKey, tail: bytes, most: int) -> bytes:
        """Return up to `most` bytes of tokens that follow the pages of `key` and `tail` in the view of `viewer`.

        `tail` is less than a page. Where several nodes follow, the viewer's own come first, the latest of them before
        others. How edges are split does not matter, as that depends on nodes in other views. Changes nothing.
        """
        node, node_pages, partial, partial_pages = self.match(self.root, viewer, key, 0, key.pages, Reach.HOST)
        if node_pages + partial_pages < key.pages:
            return b""
        if partial is not None:
            node, found = partial, partial.key[partial_pages * self.page_bytes :]
            if not found.startswith(tail):
                return b""
        else:
            found = b""
        while len(found) < len(tail) + most:
            child = self._next_in_view(node, viewer, b"" if found else tail)
            if child is None:
                break
            node, found = child, found + child.key
        return found[len(tail) : len(tail) + most]

    def _next_in_view(self, node: Node, viewer: Account, beginning: bytes) -> Node | None:
        """Return the child in a view whose tokens begin with `beginning`; of several see `continuation`."""
        seen = [
            child
            for child in self.children(node)
            if child.key.startswith(beginning) and self._is_visible(child, viewer)
        ]
        own = [child for child in seen if child.owner is viewer]
        if own:
            return max(own, key=lambda child: child.node_id)
        return min(seen, key=lambda child: (child.is_public, child.key), default=None)

    def shortened(self, match: PrefixMatch, pages: int) -> PrefixMatch:
        """Return the part of a match that covers its first `pages` pages."""
        node, depth, below = match.node, match.node_pages, match.partial
        while depth > pages:
            assert node.parent is not None, "the root is at depth 0"
            node, depth, below = node.parent, depth - node.size, node
        return PrefixMatch(node, depth) if depth == pages else PrefixMatch(node, depth, below, pages - depth)

    def group(self, parent: Node, page: bytes) -> list[Node]:
        """Return the children of all owners that begin with `page`."""
        entry = parent.children.get(page)
        if entry is None:
            return []
        return list(entry.values()) if isinstance(entry, dict) else [entry]

    def children(self, node: Node) -> list[Node]:
        found: list[Node] = []
        for entry in node.children.values():
            if isinstance(entry, dict):
                found.extend(entry.values())
            else:
                found.append(entry)
        return found

    def first_page(self, node: Node) -> bytes:
        """Return the tokens under which the parent stores the node."""
        return node.key[: self.page_bytes]

    def split(self, node: Node, pages: int) -> Node:
        """Cut an edge after `pages` pages; return the new upper half.

        The lower half remains the same object with the same end, so that references to it cover as many tokens as
        before. Both halves have the history of the whole.
        """
        assert 0 < pages < node.size
        parent = node.parent
        assert parent is not None
        cut = pages * self.page_bytes
        upper = self._make(parent, node.owner, node.key[:cut], node.pages[:pages])
        node.copy_history_to(upper)
        if node.host_pages is not None:
            upper.host_pages, node.host_pages = _frozen(node.host_pages[:pages]), _frozen(node.host_pages[pages:])
        self._replace(node, upper)
        node.key = node.key[cut:]
        node.pages = _frozen(node.pages[pages:])
        self._link(node, upper)
        self.node_count += 1
        return upper

    def attach(self, parent: Node, owner: Account, key: bytes, pages: PageIds) -> Node:
        """Attach a new leaf with device pages below `parent`."""
        node = self._make(parent, owner, key, pages)
        self._link(node, parent)
        self.node_count += 1
        return node

    def extend(self, leaf: Node, key: bytes, pages: PageIds) -> None:
        """Extend a leaf's edge at its end."""
        assert not leaf.children
        leaf.key += key
        leaf.pages = _frozen(np.concatenate([leaf.pages, pages]))

    def trim(self, leaf: Node, pages: int) -> PageIds:
        """Remove the last `pages` pages of a leaf, but not all; return them."""
        assert not leaf.children
        assert 0 < pages < len(leaf.pages)
        kept = len(leaf.pages) - pages
        dropped = leaf.pages[kept:]
        leaf.key = leaf.key[: kept * self.page_bytes]
        leaf.pages = _frozen(leaf.pages[:kept])
        return dropped

    def detach(self, leaf: Node) -> PageIds:
        """Remove a leaf, which is dead afterwards; return its pages."""
        assert not leaf.children
        self._unlink(leaf)
        self.node_count -= 1
        dropped = leaf.pages
        leaf.key, leaf.pages = b"", dropped[:0]
        return dropped

    def set_host_pages(self, node: Node, pages: PageIds | None) -> None:
        """Set or clear a node's copy on the host, and update its parent's `host_children`."""
        assert node.parent is not None
        node.parent.host_children += (pages is not None) - (node.host_pages is not None)
        node.host_pages = None if pages is None else _frozen(pages)

    def rehang(self, node: Node, parent: Node) -> None:
        """Move a node with its descendants below another parent."""
        self._unlink(node)
        self._link(node, parent)

    def hand_over(self, node: Node, owner: Account) -> None:
        """Change a node's owner."""
        parent = node.parent
        assert parent is not None
        self._unlink(node)
        for child in self.children(node):
            _forget_top(child)
        node.owner = owner
        self._link(node, parent)
        for child in self.children(node):
            _note_top(child)

    def absorb_child(self, node: Node, child: Node) -> None:
        """Replace a node by its only child, with both edges joined; the node is dead afterwards."""
        assert len(node.children) == 1
        self._unlink(child)
        self._replace(node, child)
        child.key = node.key + child.key
        child.pages = _frozen(np.concatenate([node.pages, child.pages]))
        if node.host_pages is not None and child.host_pages is not None:
            child.host_pages = _frozen(np.concatenate([node.host_pages, child.host_pages]))
        node.key, node.pages = b"", node.pages[:0]
        self.node_count -= 1

    def path_pages(self, node: Node, above: Node) -> PageIds:
        """Return the pages from below `above`, an ancestor, to the end of `node`."""
        parts = [node.pages[:0]]
        while node is not above:
            parts.append(node.pages)
            assert node.parent is not None
            node = node.parent
        return np.concatenate(parts[::-1])

    def path_key(self, node: Node) -> bytes:
        """Return the tokens from the root to the end of `node`, in the form of `PagedKey`."""
        parts: list[bytes] = []
        at: Node | None = node
        while at is not None:
            parts.append(at.key)
            at = at.parent
        return b"".join(reversed(parts))

    def depth_pages(self, node: Node) -> int:
        """Return the number of pages from the root to the end of `node`."""
        depth = 0
        at: Node | None = node
        while at is not None:
            depth += at.size
            at = at.parent
        return depth

    def shared_pages(self, node: Node) -> tuple[int, int]:
        """Return the numbers of PUBLIC and of TENANT pages on the path to `node`; they come in this order."""
        while not node.owner.is_shared:
            assert node.parent is not None, "the root is public"
            node = node.parent
        tenant = 0
        while not node.owner.is_public:
            assert node.parent is not None, "the root is public"
            tenant += node.size
            node = node.parent
        return self.depth_pages(node), tenant

    def is_below(self, node: Node, top: Node) -> bool:
        """Whether `node` is `top` or a descendant of it."""
        at: Node | None = node
        while at is not None:
            if at is top:
                return True
            at = at.parent
        return False

    def walk(self, top: Node | None = None) -> Iterator[tuple[Node, int]]:
        """Yield every node below `top` (the root by default) with its depth in pages from there, parents first."""
        stack = [(child, 0) for child in reversed(self.children(top or self.root))]
        while stack:
            node, above = stack.pop()
            depth = above + node.size
            yield node, depth
            stack.extend((child, depth) for child in reversed(self.children(node)))

    def walk_view(self, viewer: Account) -> Iterator[tuple[Node, int]]:
        """Yield the nodes in the view of `viewer` with their depths, parents first."""
        stack = [(self.root, 0)]
        while stack:
            node, above = stack.pop()
            if node is not self.root:
                yield node, above + node.size
            depth = above + node.size
            stack.extend((child, depth) for child in reversed(self.children(node)) if self._is_visible(child, viewer))

    def walk_owned(self, *owners: Account, top: Node | None = None) -> Iterator[Node]:
        """Yield the nodes of `owners` that are connected below `top` (the root by default), parents first."""
        stack = [child for child in self.children(top or self.root) if child.owner in owners]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(child for child in self.children(node) if child.owner in owners)

    def _is_visible(self, node: Node, viewer: Account) -> bool:
        if node.owner is viewer:
            return True
        return (node.owner is self._public or node.owner is viewer.tenant) and not node.is_hidden_from(viewer)

    def _make(self, parent: Node | None, owner: Account, key: bytes, pages: PageIds) -> Node:
        node = Node(NodeId(self._next_id), parent, owner, key, _frozen(pages))
        self._next_id += 1
        return node

    def _link(self, node: Node, parent: Node) -> None:
        node.parent = parent
        page = node.key[: self.page_bytes]
        entry = parent.children.get(page)
        if entry is None:
            parent.children[page] = node
        elif isinstance(entry, dict):
            assert node.owner not in entry, "the tree has a child with this owner and page"
            entry[node.owner] = node
        else:
            assert node.owner is not entry.owner, "the tree has a child with this owner and page"
            parent.children[page] = {entry.owner: entry, node.owner: node}
        parent.live_children += node.state is _LIVE
        parent.host_children += node.host_pages is not None
        _note_top(node)

    def _unlink(self, node: Node) -> None:
        """Remove a node from its parent's children; its `parent` stays set."""
        parent = node.parent
        assert parent is not None
        page = node.key[: self.page_bytes]
        entry = parent.children[page]
        if isinstance(entry, dict):
            del entry[node.owner]
            if len(entry) == 1:
                parent.children[page] = next(iter(entry.values()))
        else:
            del parent.children[page]
        parent.live_children -= node.state is _LIVE
        parent.host_children -= node.host_pages is not None
        _forget_top(node)

    def _replace(self, old: Node, new: Node) -> None:
        """Put `new`, of the same owner, state and first page, in the place of `old`."""
        parent = old.parent
        assert parent is not None
        page = old.key[: self.page_bytes]
        entry = parent.children[page]
        if isinstance(entry, dict):
            entry[old.owner] = new
        else:
            parent.children[page] = new
        _forget_top(old)
        new.parent = parent
        _note_top(new)


def _note_top(node: Node) -> None:
    assert node.parent is not None
    if node.owner is not node.parent.owner and not node.is_public:
        node.owner.tops[node] = None


def _forget_top(node: Node) -> None:
    node.owner.tops.pop(node, None)


def _frozen(pages: PageIds) -> PageIds:
    """Return a read-only copy: a view would keep the original array alive."""
    copy = pages.copy()
    copy.flags.writeable = False
    return copy
