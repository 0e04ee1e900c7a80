"""The blocks that can be matched on each medium, derived from the cache's own events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from services.scheduler.cache.keys import TOKEN_BYTES, chain_hashes
from services.scheduler.cache.types import PUBLIC_SCOPE, NodeState, Visibility, scope_of
from services.scheduler.kv_events.messages import MEDIUM_DEVICE, MEDIUM_HOST, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.cache.types import NodeId, NodeSnapshot, Scope


class UnknownParentError(Exception):
    """A node's parent is not known, so an event was missed."""


@dataclass(frozen=True, slots=True)
class _Edge:
    """The pages of a node, the first at page `first` of the prompt, and the media on which they are."""

    scope: Scope
    first: int
    chains: tuple[bytes, ...]
    names: tuple[int, ...]
    parent_name: int | None
    media: frozenset[str]


class BlockIndex:
    """Follows one cache.

    Several nodes can hold the same block, for example both halves of an edge while it is split: a block is stored with
    the first and removed with the last of them.
    """

    def __init__(self, name_block: Callable[[Scope, bytes], int], page_size: int) -> None:
        """`name_block` returns the name of a block from its scope and the hash of all tokens up to its end."""
        self._name_block = name_block
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._edges: dict[NodeId, _Edge] = {}
        self._nodes: dict[str, Counter[int]] = {MEDIUM_DEVICE: Counter(), MEDIUM_HOST: Counter()}

    @property
    def stored(self) -> dict[str, frozenset[int]]:
        """The names of all blocks by medium."""
        return {medium: frozenset(nodes) for medium, nodes in self._nodes.items()}

    def apply(self, node: NodeSnapshot) -> list[BlockStored | BlockRemoved]:
        """Note a node after an event, and return what that changes.

        Raises:
            UnknownParentError: its parent was never reported.
        """
        old = self._edges.pop(node.node_id, None)
        new = self._edge(node, old) if node.edge_tokens else None
        if new is not None:
            self._edges[node.node_id] = new
        if old is not None and new is not None and (old.names, old.media) == (new.names, new.media):
            return []
        # Additions first, so that a block which only moves between nodes is not reported.
        stored = [] if new is None else [event for medium in sorted(new.media) for event in self._add(new, medium)]
        removed = [] if old is None else [event for medium in sorted(old.media) for event in self._drop(old, medium)]
        return [*stored, *removed]

    def _edge(self, node: NodeSnapshot, old: _Edge | None) -> _Edge:
        scope = _scope(node)
        chain, parent_name = b"", None
        if node.parent_id is not None:
            parent = self._edges.get(node.parent_id)
            if parent is None:
                raise UnknownParentError
            chain, parent_name = parent.chains[-1], parent.names[-1]
        pages = node.edge_tokens // self._page_size
        first = node.depth_tokens // self._page_size - pages
        # The tokens of a node's path never change, so neither do the hashes of pages that it still has.
        chains: tuple[bytes, ...] = ()
        names: tuple[int, ...] = ()
        if old is not None and first >= old.first:
            chains = old.chains[first - old.first :][:pages]
            names = old.names[first - old.first :][:pages] if scope == old.scope else ()
        if len(chains) < pages:
            key = node.key[len(chains) * self._page_bytes :]
            added = chain_hashes(key, self._page_bytes, chains[-1] if chains else chain)
            chains = (*chains, *added)
        names = (*names, *(self._name_block(scope, chain) for chain in chains[len(names) :]))
        return _Edge(scope, first, chains, names, parent_name, _media(node))

    def _add(self, edge: _Edge, medium: str) -> Iterable[BlockStored]:
        nodes = self._nodes[medium]
        is_new = [name not in nodes for name in edge.names]
        nodes.update(edge.names)
        for new, run in groupby(range(len(is_new)), key=is_new.__getitem__):
            if new:
                blocks = list(run)
                parent = edge.names[blocks[0] - 1] if blocks[0] else edge.parent_name
                yield BlockStored([edge.names[block] for block in blocks], parent, [], self._page_size, medium=medium)

    def _drop(self, edge: _Edge, medium: str) -> Iterable[BlockRemoved]:
        nodes = self._nodes[medium]
        nodes.subtract(edge.names)
        gone = [name for name in edge.names if nodes[name] <= 0]
        for name in gone:
            del nodes[name]
        if gone:
            yield BlockRemoved(gone, medium=medium)


def _scope(node: NodeSnapshot) -> Scope:
    if node.visibility is Visibility.PUBLIC:
        return PUBLIC_SCOPE
    if node.visibility is Visibility.TENANT:
        return (node.tenant or "",)
    if node.owner is None:
        raise ValueError("a private node without an owner")
    return scope_of(node.owner)


def _media(node: NodeSnapshot) -> frozenset[str]:
    media = set()
    if node.state is not NodeState.ON_HOST:
        media.add(MEDIUM_DEVICE)
    if node.host_pages is not None:
        media.add(MEDIUM_HOST)
    return frozenset(media)
