from __future__ import annotations

import numpy as np

from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.types import CacheEventKind, NodeId, NodeSnapshot, Visibility
from services.scheduler.past_decisions import PastDecisions


def shared(number: int) -> NodeSnapshot:
    ids = np.arange(16, dtype=np.int32)
    return NodeSnapshot(
        NodeId(number), None, 16, 16, Visibility.TENANT, None, "acme", 0, 0, ids[:1], ids.tobytes(), host_pages=ids[:1]
    )


def test_the_last_decisions_are_kept_with_their_times_and_without_text() -> None:
    times = iter([10.0, 20.0, 30.0, 40.0])
    events = CacheEvents()
    past = PastDecisions(events, lambda: next(times), limit=3)
    assert past.latest(5) == []
    decisions = [CacheEventKind.PROMOTED, CacheEventKind.QUARANTINED, CacheEventKind.DEMOTED, CacheEventKind.PROMOTED]
    for number, kind in enumerate(decisions, 1):
        events.emit(CacheEventKind.INSERTED, shared(100))
        events.emit(kind, shared(number))
    kept = past.latest(5)
    assert [(each.event.sequence, each.event.kind, each.taken_at) for each in kept] == [
        (4, CacheEventKind.QUARANTINED, 20),
        (6, CacheEventKind.DEMOTED, 30),
        (8, CacheEventKind.PROMOTED, 40),
    ]
    nodes = [each.event.node for each in kept if each.event.node]
    assert [(node.node_id, node.tenant, node.edge_tokens) for node in nodes] == [(n, "acme", 16) for n in (2, 3, 4)]
    assert not any(len(node.token_ids) or len(node.pages) or node.host_pages is not None for node in nodes)
    assert past.latest(1) == kept[2:]
    assert past.latest(0) == []
