"""What the scheduler records in its audit log: acts of callers and decisions of its cache, without any text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from common.audit.chain import files_of
from common.audit.log import NoAudit
from common.audit.records import AuditRecord, read_records
from common.audit.verification import verify_chain
from common.settings import AuditSettings
from common.types import Subject
from common.wire.identity import subject_to_wire
from protos.gen.pando.v1 import operations_pb2, operations_pb2_grpc, scheduler_pb2
from services.scheduler.audit_desk import note_decisions
from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.types import CacheEventKind, NodeId, NodeSnapshot, Visibility
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

TRACED = (*ADMIN, ("x-request-id", "req_1"))
CACHE = {"epoch_seconds": 0.3, "promotion_epochs": 1000, "quota_share": 1.0}


@pytest.fixture
def limits_file(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text("[tenants.acme]\nweight = 2.0\n")
    return path


@pytest.fixture
async def audited(tmp_path: Path, limits_file: Path) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(tmp_path, limits_file, cache=CACHE)
    pipeline.settings = pipeline.settings.model_copy(update={"audit": AuditSettings(directory=tmp_path / "audit")})
    await pipeline.start()
    await pipeline.ready()
    yield pipeline
    await pipeline.stop()
    files = files_of(tmp_path / "audit" / "scheduler")
    assert verify_chain(files).broken is None
    content = b"".join(path.read_bytes() for path in files).decode()
    assert "let me in" not in content
    assert ", ".join(map(str, PROMPT[:4])) not in content
    assert ",".join(map(str, PROMPT[:4])) not in content


def records(tmp_path: Path, action: str) -> list[dict[str, Any]]:
    parts = [part for path in files_of(tmp_path / "audit" / "scheduler") for part in read_records(path.read_bytes())]
    fields = [dict(part.fields) for part in parts if isinstance(part, AuditRecord)]
    return [each for each in fields if each["action"] == action]


async def test_pins_unpins_and_forgets_are_recorded_with_their_caller(audited: Pipeline, tmp_path: Path) -> None:
    await audited.submit("1", user="alice")
    await audited.finished("1")
    stub = audited.stub
    await stub.Pin(scheduler_pb2.PinRequest(token_ids=PROMPT), metadata=TRACED)
    await stub.Unpin(scheduler_pb2.UnpinRequest(token_ids=PROMPT), metadata=ADMIN)
    subject = subject_to_wire(Subject("tenant", "alice"))
    await stub.Forget(scheduler_pb2.ForgetRequest(subject=subject), metadata=ADMIN)
    begun, done = records(tmp_path, "cache.pin")
    assert begun["request_id"] == done["request_id"] == "req_1"
    assert begun["actor"]["credential"] == "scheduler.admin_token"
    assert done["what"] == {"pinned_tokens": 28}
    [unpinned, result] = records(tmp_path, "cache.unpin")
    assert unpinned["what"] == begun["what"]
    assert begun["what"]["tokens"] == len(PROMPT)
    assert result["what"] == {"was_pinned": True}
    forgotten, _ = records(tmp_path, "cache.forget")
    assert forgotten["what"] == {"tenant": "tenant", "subject": "alice", "session": None}


async def test_a_promotion_is_recorded_with_its_evidence(audited: Pipeline, tmp_path: Path) -> None:
    for user in ("alice", "bob", "cid"):
        await audited.submit(user, user=user)
    await audited.finished("alice", "bob", "cid")
    # In one piece or several, by the borders of epochs.
    await until(lambda: sum(each["what"]["tokens"] for each in records(tmp_path, "cache.promoted")) == 28)
    for promoted in records(tmp_path, "cache.promoted"):
        assert promoted["actor"] == {"system": "scheduler"}
        what = promoted["what"]
        assert (what["visibility"], what["tenant"], what["subjects"], what["pinned"]) == ("tenant", "tenant", 3, False)


class NotedDecisions(NoAudit):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, object]]] = []

    def note(self, action: str, what: Mapping[str, object], _outcome: str = "done") -> None:
        self.notes.append((action, dict(what)))


def test_only_decisions_of_the_cache_are_recorded() -> None:
    node = NodeSnapshot(
        node_id=NodeId(7),
        parent_id=None,
        edge_tokens=16,
        depth_tokens=48,
        visibility=Visibility.TENANT,
        owner=None,
        tenant="acme",
        lock_ref=0,
        last_access=0,
        pages=np.zeros(1, np.int32),
        key=bytes(64),
        epoch=5,
        quarantined=2,
        quarantined_tenants=1,
        promoted_by=4,
    )
    audit, events = NotedDecisions(), CacheEvents()
    stop = note_decisions(audit, events)
    for kind in CacheEventKind:
        events.emit(kind, node)
    place = {"node": 7, "visibility": "tenant", "tenant": "acme", "depth_tokens": 48, "tokens": 16, "epoch": 5}
    assert dict(audit.notes) == {
        "cache.promoted": {**place, "subjects": 4, "tenants": 0, "pinned": False},
        "cache.demoted": place,
        "cache.quarantined": {**place, "subjects": 2, "tenants": 1},
    }
    assert not events.is_heard(CacheEventKind.INSERTED)
    stop()
    assert not events.is_heard(CacheEventKind.PROMOTED)


async def test_other_acts_are_recorded_with_their_outcome(audited: Pipeline, tmp_path: Path) -> None:
    stub = audited.stub
    await stub.FlushCache(scheduler_pb2.FlushCacheRequest(), metadata=ADMIN)
    await stub.Pause(scheduler_pb2.PauseRequest(), metadata=ADMIN)
    await stub.Resume(scheduler_pb2.ResumeRequest(), metadata=ADMIN)
    await stub.SetRole(scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_PREFILL), metadata=ADMIN)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.LoadAdapter(scheduler_pb2.LoadAdapterRequest(name="a", source="/none"), metadata=ADMIN)
    operations = operations_pb2_grpc.OperationsStub(audited.channel)
    await operations.SetLogLevel(operations_pb2.SetLogLevelRequest(level=operations_pb2.LOG_LEVEL_INFO))
    for action in ("cache.flush", "group.pause", "group.resume", "group.set_role", "log.set_level"):
        assert [each["outcome"] for each in records(tmp_path, action)] == ["begun", "done"], action
    await until(lambda: len(records(tmp_path, "adapter.load")) == 2)
    _, failed = records(tmp_path, "adapter.load")
    assert (failed["outcome"], failed["what"]) == ("failed", {"error": "invalid_request"})


async def test_an_act_without_permission_is_not_done_and_not_recorded(audited: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await audited.stub.FlushCache(scheduler_pb2.FlushCacheRequest())
    assert not records(tmp_path, "cache.flush")


async def test_changed_limits_and_weights_are_recorded(audited: Pipeline, tmp_path: Path, limits_file: Path) -> None:
    [loaded] = records(tmp_path, "weights.loaded")
    assert loaded["outcome"] == "done"
    text = "[tenants.acme]\nweight = 3.0\n[tenants.other]\nwaiting = 1\n"
    await asyncio.to_thread(limits_file.write_text, text)
    await until(lambda: records(tmp_path, "limits.changed"))
    [changed] = records(tmp_path, "limits.changed")
    assert changed["what"] == {
        "tenants.acme": {"before": {"weight": 2.0}, "after": {"weight": 3.0}},
        "tenants.other": {"before": None, "after": {"waiting": 1}},
    }
