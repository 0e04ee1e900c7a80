"""What the scheduler shows of its cache, and to whom; what the operator can change in it. Over real gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr

from common.recent_images import RecentImages
from common.settings import SchedulerSettings
from common.types import Subject, View
from common.wire.identity import subject_to_wire, view_to_wire
from protos.gen.pando.v1 import scheduler_pb2, sessions_pb2
from services.scheduler import service as service_module
from services.scheduler.credentials import Credentials, read_token
from services.scheduler.event_backlog import EventBacklog
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.types import Pixels

WRONG = (("authorization", "Bearer let me out"),)
USERS = ("alice", "bob", "cid")


@pytest.fixture
async def aware(tmp_path: Path) -> AsyncIterator[Pipeline]:
    """A user-aware cache whose epochs are short."""
    pipeline = Pipeline(tmp_path, cache={"epoch_seconds": 0.3, "promotion_epochs": 1000, "quota_share": 1.0})
    await pipeline.start()
    await pipeline.ready()
    yield pipeline
    await pipeline.stop()


async def nodes_of(pipeline: Pipeline, metadata: Any = (), **request: Any) -> list[scheduler_pb2.TreeNode]:
    call = pipeline.stub.DumpTree(scheduler_pb2.DumpTreeRequest(**request), timeout=30, metadata=metadata)
    return [response.node async for response in call]


async def serve_all(pipeline: Pipeline, *users: str) -> None:
    for user in users:
        await pipeline.submit(f"{user}'s", user=user)
    await pipeline.finished(*(f"{user}'s" for user in users))


async def until_shared(pipeline: Pipeline) -> scheduler_pb2.TreeNode:
    async with asyncio.timeout(30):
        while True:
            for node in await nodes_of(pipeline):
                if node.visibility == scheduler_pb2.VISIBILITY_TENANT:
                    return node
            await asyncio.sleep(0.02)


async def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_the_tree_hides_owners_and_tokens_from_all_but_an_admin(pipeline: Pipeline) -> None:
    await serve_all(pipeline, "alice", "bob")
    for metadata in ((), WRONG):
        nodes = await nodes_of(pipeline, metadata, include_token_ids=True)
        assert len(nodes) >= 2
        assert not any(node.HasField("owner_view") or node.token_ids for node in nodes)
        assert len({node.owner_fingerprint for node in nodes}) == 2
        assert not any("alice" in str(node) or "tenant" in str(node) for node in nodes)
    nodes = await nodes_of(pipeline, ADMIN, include_token_ids=True)
    assert {node.owner_view.subject.name for node in nodes} == {"alice", "bob"}
    assert list(nodes[0].token_ids[:4]) == PROMPT[:4]


async def test_a_view_is_named_by_its_fingerprint_or_with_the_token(pipeline: Pipeline) -> None:
    await serve_all(pipeline, "alice", "bob")
    alice = view_to_wire(View(Subject("tenant", "alice")))
    own = await nodes_of(pipeline, ADMIN, view=alice)
    assert {node.owner_view.subject.name for node in own} == {"alice"}
    fingerprint = own[0].owner_fingerprint
    assert [node.node_id for node in await nodes_of(pipeline, fingerprint=fingerprint)] == [
        node.node_id for node in own
    ]
    # Otherwise a guessed name could be matched with its fingerprint.
    for metadata in ((), WRONG):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await nodes_of(pipeline, metadata, view=alice)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await nodes_of(pipeline, fingerprint="0" * 16)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watcher_sees_the_tree_first_and_then_each_change_in_order(aware: Pipeline) -> None:
    await serve_all(aware, "alice")
    events = aiter(aware.stub.WatchCacheEvents(scheduler_pb2.WatchCacheEventsRequest(), timeout=120))
    snapshot = []
    while (event := await anext(events)).kind != scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END:
        snapshot.append(event)
    assert {entry.kind for entry in snapshot} == {scheduler_pb2.CACHE_EVENT_KIND_INSERTED}
    await serve_all(aware, "bob", "cid")
    seen: list[scheduler_pb2.WatchCacheEventsResponse] = []
    async with asyncio.timeout(30):
        while scheduler_pb2.CACHE_EVENT_KIND_PROMOTED not in [entry.kind for entry in seen]:
            seen.append(await anext(events))
    sequences = [event.sequence, *(entry.sequence for entry in seen)]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    promoted = seen[-1].node
    assert promoted.promoted_by == 3
    assert promoted.promoted_epoch == (await aware.state()).cache_accounting.epoch or promoted.promoted_epoch > 0
    assert not any(entry.node.HasField("owner_view") for entry in seen)


async def test_a_late_watcher_gets_past_decisions_before_the_tree_if_it_asks(aware: Pipeline) -> None:
    await serve_all(aware, *USERS)
    shared = await until_shared(aware)

    async def beginning(**request: Any) -> list[scheduler_pb2.WatchCacheEventsResponse]:
        found = []
        call = aware.stub.WatchCacheEvents(scheduler_pb2.WatchCacheEventsRequest(**request), timeout=120)
        async for event in call:
            if event.kind == scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END:
                break
            found.append(event)
        return found

    first, *rest = await beginning(max_past_decisions=5)
    assert (first.kind, first.node.node_id) == (scheduler_pb2.CACHE_EVENT_KIND_PROMOTED, shared.node_id)
    assert (first.node.promoted_by, first.node.edge_tokens) == (3, shared.edge_tokens)
    assert first.HasField("age_ms")
    assert first.sequence <= rest[0].sequence
    assert not first.node.device_pages
    assert not first.node.HasField("owner_tenant"), "no credential was shown"
    assert len(rest) == (await aware.state()).cache_accounting.nodes
    assert not any(event.HasField("age_ms") for event in rest)
    assert {event.kind for event in await beginning()} == {scheduler_pb2.CACHE_EVENT_KIND_INSERTED}
    # They pass the filter by view like others: alice may read what her tenant shares.
    [own] = [node for node in await nodes_of(aware, ADMIN) if node.owner_view.subject.name == "alice"][:1]
    viewed = await beginning(max_past_decisions=5, fingerprint=own.owner_fingerprint)
    assert [event.node.node_id for event in viewed if event.HasField("age_ms")] == [shared.node_id]


async def test_a_slow_watcher_gets_the_number_of_lost_events_and_a_new_snapshot(
    aware: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "EventBacklog", lambda: EventBacklog(limit=2))
    prompts = [[100 * number + position for position in range(1, 10)] for number in range(1, 6)]
    for number, prompt in enumerate(prompts):
        await aware.submit(f"r{number}", prompt, user=f"user{number}", max_tokens=1)
    await aware.finished(*(f"r{number}" for number in range(5)))
    events = aiter(aware.stub.WatchCacheEvents(scheduler_pb2.WatchCacheEventsRequest(), timeout=120))
    while (await anext(events)).kind != scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END:
        pass
    before = (await aware.state()).cache_accounting.sequence
    lost_before = REGISTRY.get_sample_value("pando_scheduler_cache_events_lost_total") or 0
    # A flush is one operation with many changes, between which nobody has a turn.
    await aware.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    after = (await aware.state()).cache_accounting.sequence
    event = await asyncio.wait_for(anext(events), 30)
    assert event.kind == scheduler_pb2.CACHE_EVENT_KIND_LOST
    assert event.lost_events == after - before > 5
    assert event.sequence == after
    assert REGISTRY.get_sample_value("pando_scheduler_cache_events_lost_total") == lost_before + event.lost_events
    # The new snapshot: nothing is left.
    assert (await anext(events)).kind == scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END
    await aware.submit("next", PROMPT, user="alice")
    assert (await asyncio.wait_for(anext(events), 30)).kind == scheduler_pb2.CACHE_EVENT_KIND_INSERTED


async def test_the_state_contains_pages_per_owner_and_hit_tokens(aware: Pipeline) -> None:
    await serve_all(aware, *USERS)
    node = await until_shared(aware)
    assert (node.promoted_by, node.creators) == (3, 3)
    await aware.submit("dan's", user="dan")
    await aware.finished("dan's")
    request = scheduler_pb2.GetStateRequest(max_owners=10)
    state = await aware.stub.GetState(request, timeout=30, metadata=ADMIN)
    accounting = state.cache_accounting
    assert accounting.nodes == len(await nodes_of(aware))
    assert accounting.events["inserted"] >= 3
    assert accounting.events["promoted"] == 1
    assert accounting.hit_tokens == {"device/tenant": 28}
    assert aware.detokenizer.cached_parts == accounting.hit_tokens, "the ledger gets the engine's own counts"
    assert node.required_subjects == 3
    # On a busy machine, the answer to a heartbeat may be under way.
    assert [rank.rank for rank in state.ranks] == [0, 1]
    assert all(rank.silent_heartbeats <= 2 for rank in state.ranks)
    assert accounting.operations["commit"].calls == 4
    assert accounting.operations["commit"].cpu_seconds > 0
    assert {"peek", "insert", "release", "advance"} <= set(accounting.operations)
    owners = {owner.view.subject.name or owner.tenant or "public": owner for owner in state.owners}
    tenant = owners.pop("tenant")
    assert tenant.visibility == scheduler_pb2.VISIBILITY_TENANT
    assert tenant.device_pages == accounting.tenant_pages == 7
    assert tenant.fingerprint == node.owner_fingerprint != ""
    assert set(owners) == {"public", "alice", "bob", "cid", "dan"}
    assert owners["public"].device_pages == accounting.public_pages == 0
    assert owners["public"].fingerprint == ""
    private = sum(owner.device_pages for name, owner in owners.items())
    assert private == accounting.private_pages
    for tier in state.tiers:
        parts = tier.free_pages + tier.soft_free_pages + tier.evictable_pages + tier.protected_pages
        assert parts == tier.capacity_pages
    state = await aware.stub.GetState(scheduler_pb2.GetStateRequest(max_owners=2), timeout=30)
    assert len(state.owners) == 2
    assert not any(owner.HasField("view") for owner in state.owners)


async def test_every_count_is_a_metric(aware: Pipeline) -> None:
    def sample(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"pando_scheduler_{name}", labels) or 0.0

    before = sample("cache_events_total", kind="promoted"), sample("cache_operations_total", operation="commit")
    hits = sample("cache_hit_tokens_total", tier="device", visibility="tenant")
    await serve_all(aware, *USERS)
    await until_shared(aware)
    await aware.submit("dan's", user="dan")
    await aware.finished("dan's")
    async with asyncio.timeout(30):
        while sample("cache_events_total", kind="promoted") == before[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    # Counts are brought over by and by.
    await until(lambda: sample("cache_operations_total", operation="commit") == before[1] + 4)
    await until(lambda: sample("cache_hit_tokens_total", tier="device", visibility="tenant") == hits + 28)
    assert sample("cache_operation_cpu_seconds_total", operation="insert") > 0
    assert sample("cache_pages", visibility="tenant") == 7
    assert sample("cache_nodes") == len(await nodes_of(aware))
    for kind in ("split", "demoted", "quarantined", "evicted", "merged", "soft_freed", "revived", "reclaimed"):
        assert REGISTRY.get_sample_value("pando_scheduler_cache_events_total", {"kind": kind}) is not None


async def test_forgetting_a_user_needs_the_token_and_leaves_all_others(pipeline: Pipeline) -> None:
    await serve_all(pipeline, "alice", "bob")
    request = scheduler_pb2.ForgetRequest(subject=subject_to_wire(Subject("tenant", "alice")))
    for metadata in ((), WRONG):
        call = pipeline.stub.Forget(request, timeout=30, metadata=metadata)
        assert await status_of(call) is grpc.StatusCode.PERMISSION_DENIED
    freed = (await pipeline.stub.Forget(request, timeout=30, metadata=ADMIN)).freed_pages
    assert freed > 0
    assert {node.owner_view.subject.name for node in await nodes_of(pipeline, ADMIN)} == {"bob"}
    assert (await pipeline.stub.Forget(request, timeout=30, metadata=ADMIN)).freed_pages == 0
    nobody = pipeline.stub.Forget(scheduler_pb2.ForgetRequest(), timeout=30, metadata=ADMIN)
    assert await status_of(nobody) is grpc.StatusCode.INVALID_ARGUMENT
    await until_state(pipeline, lambda state: state.tiers[0].protected_pages == 0)


async def test_kept_pixels_are_forgotten_with_their_user_and_dropped_by_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: RecentImages[Pixels] = RecentImages(1024 * 1024)
    monkeypatch.setattr(service_module, "RecentImages", lambda _kept_bytes: images)
    pipeline, pixels = Pipeline(tmp_path), np.zeros((4, 2), np.float32)
    await pipeline.start()
    await pipeline.ready()
    alice, bob = (View(Subject("tenant", name)) for name in ("alice", "bob"))
    for view in (alice, bob):
        images.put(view, b"picture", pixels)
    request = scheduler_pb2.ForgetRequest(subject=subject_to_wire(alice.subject))
    assert await status_of(pipeline.stub.Forget(request, timeout=30)) is grpc.StatusCode.PERMISSION_DENIED
    assert images.get(alice, b"picture") is pixels
    await pipeline.stub.Forget(request, timeout=30, metadata=ADMIN)
    assert [images.get(view, b"picture") is pixels for view in (alice, bob)] == [False, True]
    await pipeline.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    assert images.get(bob, b"picture") is None
    await pipeline.stop()


async def test_sessions_are_shown_by_name_to_administrators_only_and_end_when_forgotten(pipeline: Pipeline) -> None:
    view = view_to_wire(View(Subject("tenant", "alice")))
    wish = sessions_pb2.OpenSessionRequest(view=view, session="chat", timeout_ms=60_000)
    granted = await pipeline.sessions.OpenSession(wish, timeout=30)
    assert (granted.capacity_tokens, granted.timeout_ms) == (32, 60_000)
    assert await status_of(pipeline.sessions.OpenSession(wish, timeout=30)) is grpc.StatusCode.INVALID_ARGUMENT
    for number in range(7):
        wish.session = f"more-{number}"
        await pipeline.sessions.OpenSession(wish, timeout=30)
    wish.session = "too many"
    assert await status_of(pipeline.sessions.OpenSession(wish, timeout=30)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    state = await pipeline.state()
    assert len(state.sessions) == 8
    assert not any(session.HasField("view") or session.HasField("session") for session in state.sessions)
    assert all(session.fingerprint and session.capacity_tokens == 32 for session in state.sessions)
    shown = await pipeline.stub.GetState(scheduler_pb2.GetStateRequest(), timeout=30, metadata=ADMIN)
    assert shown.sessions[0].session == "chat"
    for user, after, is_open in (("alice", None, True), ("alice", "turn", False), ("bob", None, False)):
        owner = view_to_wire(View(Subject("tenant", user)))
        find = sessions_pb2.FindSessionRequest(view=owner, session="chat", after=after)
        assert (await pipeline.sessions.FindSession(find, timeout=30)).is_open is is_open
    close = sessions_pb2.CloseSessionRequest(view=view_to_wire(View(Subject("tenant", "bob"))), session="chat")
    assert not (await pipeline.sessions.CloseSession(close, timeout=30)).was_open
    forget = scheduler_pb2.ForgetRequest(subject=view.subject)
    await pipeline.stub.Forget(forget, timeout=30, metadata=ADMIN)
    assert not (await pipeline.state()).sessions


async def test_a_pinned_prompt_is_public_after_its_first_computation(aware: Pipeline) -> None:
    pin = scheduler_pb2.PinRequest(token_ids=PROMPT[:21])
    assert await status_of(aware.stub.Pin(pin, timeout=30)) is grpc.StatusCode.PERMISSION_DENIED
    assert (await aware.stub.Pin(pin, timeout=30, metadata=ADMIN)).pinned_tokens == 20
    epoch = (await aware.state()).cache_accounting.epoch
    await until_state(aware, lambda state: state.cache_accounting.epoch > epoch + 1)
    await serve_all(aware, "alice")
    await serve_all(aware, "bob")
    assert aware.detokenizer.cached["bob's"] == 20
    (node,) = [node for node in await nodes_of(aware) if node.pinned]
    assert node.visibility == scheduler_pb2.VISIBILITY_PUBLIC
    assert not node.HasField("promoted_by")
    unpin = scheduler_pb2.UnpinRequest(token_ids=PROMPT[:21])
    assert await status_of(aware.stub.Unpin(unpin, timeout=30)) is grpc.StatusCode.PERMISSION_DENIED
    assert (await aware.stub.Unpin(unpin, timeout=30, metadata=ADMIN)).was_pinned
    assert not (await aware.stub.Unpin(unpin, timeout=30, metadata=ADMIN)).was_pinned


@pytest.mark.parametrize("ids", [[], [5, 1000], [4_000_000_000]], ids=["none", "beyond the vocabulary", "far beyond"])
async def test_a_pin_of_ids_that_no_prompt_has_is_refused(pipeline: Pipeline, ids: list[int]) -> None:
    call = pipeline.stub.Pin(scheduler_pb2.PinRequest(token_ids=ids), timeout=30, metadata=ADMIN)
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_with_a_token_set_callers_without_it_cannot_flush_pause_or_resume(pipeline: Pipeline) -> None:
    calls = (
        pipeline.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30),
        pipeline.stub.Pause(scheduler_pb2.PauseRequest(), timeout=30, metadata=WRONG),
        pipeline.stub.Resume(scheduler_pb2.ResumeRequest(), timeout=30),
    )
    for call in calls:
        assert await status_of(call) is grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_token_the_port_is_enough_to_flush_and_never_to_pin_or_forget(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, admin_token=None)
    await pipeline.start()
    await pipeline.ready()
    await pipeline.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30)
    pin = pipeline.stub.Pin(
        scheduler_pb2.PinRequest(token_ids=PROMPT), timeout=30, metadata=(("authorization", "Bearer "),)
    )
    assert await status_of(pin) is grpc.StatusCode.PERMISSION_DENIED
    await pipeline.stop()


def test_fingerprints_are_stable_opaque_and_different_for_neighbours() -> None:
    ann, nna = View(Subject("acme", "ann")), View(Subject("acmea", "nn"))
    one, again, other, unset = Credentials("a"), Credentials("a"), Credentials("b"), Credentials(None)
    assert one.fingerprint(ann) == again.fingerprint(ann)
    assert len({c.fingerprint(p) for c in (one, other, unset) for p in (ann, nna)}) == 6
    assert one.fingerprint(View(Subject("acme", "\ud800"))) != one.fingerprint(ann)


def test_the_token_is_that_of_the_setting_or_of_the_file_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert read_token(SchedulerSettings(admin_token=SecretStr("direct"))) == "direct"
    assert read_token(SchedulerSettings(admin_token=SecretStr(f"file:{file}"))) == "from a file"
    assert read_token(SchedulerSettings()) is None
