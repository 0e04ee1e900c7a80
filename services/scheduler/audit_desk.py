"""Records in the audit log: callers' acts, decisions of the cache, and changes of limits and weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from services.scheduler.cache.events import DECISIONS
from services.scheduler.cache.types import CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from typing import Any

    import grpc

    from common.audit.log import Audit, What
    from common.types import TokenIds
    from services.scheduler.cache.interface import EventSource
    from services.scheduler.cache.types import CacheEvent
    from services.scheduler.credentials import Credentials


class CallerActs:
    """Records the acts of the servicer's callers."""

    def __init__(self, audit: Audit, credentials: Credentials) -> None:
        """Record in `audit`; `credentials` name prompts and recognise administrators."""
        self._audit = audit
        self._credentials = credentials

    def act(
        self,
        action: str,
        context: grpc.aio.ServicerContext[Any, Any],  # Any: requests and responses differ by method
        **what: object,
    ) -> AbstractAsyncContextManager[What]:
        """Return the block in which an act is done; see `common.audit.log.Audit.act`."""
        identity = context.auth_context()
        names = [*identity.get("peer_uri", ()), *identity.get("peer_dns", ())]
        is_admin = self._credentials.is_admin(dict(context.invocation_metadata() or ()))
        actor: What = {"peer": context.peer(), "credential": "scheduler.admin_token" if is_admin else None}
        if names:
            actor["certificate"] = [name.decode(errors="replace") for name in names]
        return self._audit.act(action, actor, what)

    def prompt(self, token_ids: TokenIds) -> What:
        """Describe a prompt without its content: pins of the same prompt have the same fingerprint."""
        digest = hashlib.sha256(token_ids.astype("<i4").tobytes()).hexdigest()
        return {"tokens": len(token_ids), "prompt": self._credentials.fingerprint(f"prompt:{digest}")}


def note_decisions(audit: Audit, events: EventSource) -> Callable[[], None]:
    """Record the decisions of a cache from now on, until the returned function is called."""

    def note(event: CacheEvent) -> None:
        node = event.node
        if node is None:
            return
        what: What = {
            "node": node.node_id,
            "visibility": node.visibility.value,
            "tenant": node.tenant,
            "depth_tokens": node.depth_tokens,
            "tokens": node.edge_tokens,
            "epoch": node.epoch,
        }
        if event.kind is CacheEventKind.PROMOTED:
            what |= {"subjects": node.promoted_by, "tenants": node.promoted_tenants, "pinned": node.pinned}
        elif event.kind is CacheEventKind.QUARANTINED:
            what |= {"subjects": node.quarantined, "tenants": node.quarantined_tenants}
        audit.note(f"cache.{event.kind.value}", what)

    return events.subscribe(note, DECISIONS)
