"""Tracks which sessions of a view used its nodes, so that a session alone can be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.locks import LockedPath
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore

# A node used by more sessions of one view than this is attributed to none of them, as it is probably a prompt of the
# user's own application; it is forgotten with the view.
SESSIONS_PER_NODE = 16


def tag_path(locked: LockedPath) -> None:
    """Record that a lock's session, or a request without one, has used the view's own nodes on its path."""
    account, node = locked.account, locked.node
    if locked.sessions is not None:
        account.has_sessions = True
    elif not account.has_sessions:
        return
    while node is not None and node.owner is account and not node.is_public:
        if node.sessions is not None:
            both = None if locked.sessions is None else node.sessions | locked.sessions
            node.sessions = both if both is not None and len(both) <= SESSIONS_PER_NODE else None
        node = node.parent


def is_left_by(node: Node, session: str) -> bool:
    """Whether no request outside of this session has used a node."""
    return node.sessions is not None and not node.sessions - {session}


def forget_session(store: NodeStore, account: Account, session: str) -> int:
    """Drop nodes used by this session only, on which it has no lock; return the number of pages that became free."""
    freed = 0
    for top in list(account.tops):
        for node in reversed([top, *(node for node, _ in store.tree.walk(top))]):
            if node.sessions is None or session not in node.sessions:
                continue
            node.sessions -= {session}
            # A request that uses a node has used all its ancestors, so a node without users has no children.
            if not (node.sessions or node.children or node.lock_ref):
                freed += store.remove(node)
    return freed
