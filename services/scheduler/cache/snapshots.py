"""Snapshots of nodes and owners for the cache's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.types import NodeSnapshot, OwnerSnapshot, Visibility, view_of

if TYPE_CHECKING:
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.tree import PageTree


def node_snapshot(tree: PageTree, node: Node, depth_pages: int, required_subjects: int) -> NodeSnapshot:
    """Return a snapshot of a node that ends `depth_pages` pages below the root.

    It copies no arrays, as nodes replace theirs.
    """
    assert node.parent is not None, "the root has no view"
    hidden = (node.quarantined or {}).values()
    return NodeSnapshot(
        node_id=node.node_id,
        parent_id=None if node.parent is tree.root else node.parent.node_id,
        edge_tokens=node.size * tree.page_size,
        depth_tokens=depth_pages * tree.page_size,
        visibility=node.visibility,
        owner=None if node.is_shared else view_of(node.owner_id),
        tenant=node.owner_id[0] if node.visibility is Visibility.TENANT else None,
        lock_ref=node.lock_ref,
        last_access=node.last_access,
        pages=node.pages,
        key=node.key,
        state=node.state,
        hits=node.hit_cur,
        users=node.distinct_users,
        previous_hits=node.hit_pre,
        previous_users=node.u_pre,
        epoch=node.epoch,
        creators=len(node.creators or ()),
        quarantined=len(hidden) - sum(quarantine.is_whole for quarantine in hidden),
        quarantined_tenants=sum(quarantine.is_whole for quarantine in hidden),
        generation=node.generation,
        priority=node.priority,
        pinned=node.pinned,
        no_promote=node.no_promote,
        promoted_by=node.promoted[0] if node.promoted else None,
        promoted_epoch=node.promoted[1] if node.promoted else None,
        promoted_tenants=len(node.tenants or ()),
        required_subjects=required_subjects,
        host_pages=node.host_pages,
        host_ref=node.host_ref,
    )


def owner_snapshot(account: Account, host_pages: int) -> OwnerSnapshot:
    """Return a snapshot of a view, a tenant or the public; the caller supplies its number of host pages."""
    return OwnerSnapshot(
        view=None if account.is_shared else view_of(account.scope),
        tenant=account.scope[0] if account.is_shared and not account.is_public else None,
        device_pages=account.live_pages,
        host_pages=host_pages,
        nodes=account.nodes,
        locks=account.locks,
        last_epoch=account.last_epoch,
        is_active=account.is_active,
    )
