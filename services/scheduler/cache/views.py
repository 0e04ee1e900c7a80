"""Nodes as the outside sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.types import Principal
from services.scheduler.cache.interface import NodeView, Visibility

if TYPE_CHECKING:
    from services.scheduler.cache.tree import Node, PageTree


def view(tree: PageTree, node: Node, depth_pages: int) -> NodeView:
    """Describe a node whose end is `depth_pages` pages below the root. Copies nothing: nodes replace their arrays."""
    assert node.parent is not None, "the root has no view"
    return NodeView(
        node_id=node.node_id,
        parent_id=None if node.parent is tree.root else node.parent.node_id,
        edge_tokens=len(node.pages) * tree.page_size,
        depth_tokens=depth_pages * tree.page_size,
        visibility=Visibility.PRIVATE if node.scope else Visibility.PUBLIC,
        owner=Principal(*node.scope) if node.scope else None,
        lock_ref=node.lock_ref,
        last_access=node.last_access,
        pages=node.pages,
        token_ids=np.frombuffer(node.key, np.int32),
    )
