"""Which of a view's nodes came from which of its sessions, so that a session alone can be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.locks import LockedPath
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore

# More sessions of one view than this have a node in common only if it belongs to none of them, such as a prompt of the
# user's own app; it goes with the view.
SESSIONS_PER_NODE = 16


def tag_path(locked: LockedPath) -> None:
    """Note that a lock's session, or a request without one, has used its path: a private node is all its users'."""
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
    """Whether nobody else's use of a node is left without this session."""
    return node.sessions is not None and not node.sessions - {session}


def forget_session(store: NodeStore, account: Account, session: str) -> int:
    """Drop what only this session has used; return how many pages became free. No lock of it may hold a node."""
    freed = 0
    for top in list(account.tops):
        for node in reversed([top, *(node for node, _ in store.tree.walk(top))]):
            if node.sessions is None or session not in node.sessions:
                continue
            node.sessions -= {session}
            # Whoever uses a node has used all above it, so what is left without a user has no children.
            if not (node.sessions or node.children or node.lock_ref):
                freed += store.remove(node)
    return freed
