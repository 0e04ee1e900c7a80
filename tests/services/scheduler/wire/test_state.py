from __future__ import annotations

import numpy as np
import pytest

from common.types import Subject, View
from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler.cache.types import (
    CacheEvent,
    CacheEventKind,
    NodeId,
    NodeSnapshot,
    NodeState,
    Visibility,
)
from services.scheduler.wire.state import Disclosure, event_to_wire, node_to_wire

NODE = NodeSnapshot(
    node_id=NodeId(7),
    parent_id=NodeId(3),
    edge_tokens=2,
    depth_tokens=4,
    visibility=Visibility.PUBLIC,
    owner=View(Subject("acme", "ann")),
    tenant="acme",
    lock_ref=1,
    last_access=9,
    pages=np.array([5], np.int32),
    key=np.array([1, 2], np.int32).tobytes(),
    state=NodeState.SOFT_FREE,
    hits=11,
    users=12,
    previous_hits=13,
    previous_users=14,
    epoch=15,
    creators=16,
    quarantined=17,
    quarantined_tenants=2,
    generation=18,
    priority=-1,
    pinned=True,
    no_promote=True,
    host_pages=np.array([4], np.int32),
    host_ref=1,
    promoted_by=3,
    promoted_epoch=12,
    promoted_tenants=4,
    required_subjects=6,
)
ADMIN = Disclosure(is_admin=True, fingerprint=lambda _: "f" * 16, with_ids=True)
STRANGER = Disclosure(is_admin=False, fingerprint=lambda _: "f" * 16, with_ids=True)


def test_every_field_of_a_node_is_converted() -> None:
    message = node_to_wire(NODE, ADMIN)
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in scheduler_pb2.TreeNode.DESCRIPTOR.fields
    }
    assert (message.hits, message.users, message.previous_hits, message.previous_users) == (11, 12, 13, 14)
    assert (message.epoch, message.creators, message.quarantined, message.generation) == (15, 16, 17, 18)
    assert message.state == scheduler_pb2.NODE_STATE_SOFT_FREE


def test_without_a_credential_neither_owner_nor_tokens_are_shown() -> None:
    message = node_to_wire(NODE, STRANGER)
    assert not message.HasField("owner_view")
    assert not message.HasField("owner_tenant")
    assert not message.token_ids
    assert message.owner_fingerprint == "f" * 16


@pytest.mark.parametrize("kind", CacheEventKind)
def test_every_kind_of_event_has_its_name_on_the_wire(kind: CacheEventKind) -> None:
    message = event_to_wire(CacheEvent(3, kind, NODE), STRANGER)
    assert scheduler_pb2.CacheEventKind.Name(message.kind) == f"CACHE_EVENT_KIND_{kind.name}"
