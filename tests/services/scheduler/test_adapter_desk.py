"""Adapters of a scheduler with real gRPC and fake workers: names, slots in plans, keys of the cache, restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from common.adapters import AdapterInfo
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from services.scheduler.adapter_desk import READS_AT_ONCE
from services.scheduler.adapter_manifest import AdapterManifest
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.pipeline import ADMIN, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fakes.worker_service import FakeWorkerService

PROMPT = list(range(1, 41))


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    adapters = {"slots": 2, "limit": 3, "load": {"given": "/given"}}
    made = Pipeline(tmp_path, page_size=16, max_step_tokens=64, adapters=adapters)
    await made.start()
    await made.ready()
    yield made
    await made.stop()


async def load(pipeline: Pipeline, name: str, source: str, *, pinned: bool = False) -> common_pb2.AdapterInfo:
    request = scheduler_pb2.LoadAdapterRequest(name=name, source=source, pinned=pinned)
    return (await pipeline.stub.LoadAdapter(request, metadata=ADMIN, timeout=30)).adapter


async def unload(pipeline: Pipeline, name: str) -> bool:
    request = scheduler_pb2.UnloadAdapterRequest(name=name)
    return (await pipeline.stub.UnloadAdapter(request, metadata=ADMIN, timeout=30)).was_loaded


async def listed(pipeline: Pipeline) -> dict[str, scheduler_pb2.AdapterState]:
    answer = await pipeline.stub.ListAdapters(scheduler_pb2.ListAdaptersRequest(), metadata=ADMIN, timeout=30)
    return {state.adapter.name: state for state in answer.adapters}


async def submit(pipeline: Pipeline, name: str, adapter: str, max_tokens: int | None = 4) -> common_pb2.Admission:
    request = make_request(name, PROMPT, max_tokens=max_tokens)
    request = replace(request, options=replace(request.options, adapter=adapter))
    message = scheduler_pb2.SchedulerSubmitRequest(schedules=[schedule_request_to_wire(request)])
    await pipeline._call.write(message)
    await until(lambda: name in pipeline.admissions)
    return pipeline.admissions[name]


async def run(pipeline: Pipeline, name: str, adapter: str) -> int:
    """Serve a request; return the number of tokens that it found in the cache."""
    assert not (await submit(pipeline, name, adapter)).HasField("rejected")
    await pipeline.finished(name)
    opened = [opened for plan in pipeline.workers[0].plans for opened in plan.opens if opened.request_id == name]
    assert len(opened) == 1
    return opened[0].computed_tokens


def forget_adapters(worker: FakeWorkerService) -> None:
    """Have a worker know as little as one that has just started."""
    worker.adapters.clear()
    worker.kept_adapters.clear()


def digests_of(found: dict[str, scheduler_pb2.AdapterState]) -> set[str]:
    return {state.adapter.digest for state in found.values()}


def slots_of(pipeline: Pipeline) -> list[tuple[int, str]]:
    return [(load.slot, load.digest) for plan in pipeline.workers[0].plans for load in plan.adapters]


async def test_plans_load_adapters_before_rows_use_them(pipeline: Pipeline) -> None:
    given, new = (await listed(pipeline))["given"].adapter, await load(pipeline, "new", "/new")
    await run(pipeline, "one", "given")
    await run(pipeline, "two", "new")
    await run(pipeline, "three", "given")
    assert [digest for _, digest in slots_of(pipeline)] == [given.digest, new.digest]
    opens = {str(opened.request_id): opened.adapter for plan in pipeline.workers[0].plans for opened in plan.opens}
    assert opens["one"] == opens["three"] != opens["two"]
    assert {name: state.resident for name, state in (await listed(pipeline)).items()} == {"given": True, "new": True}


async def test_an_adapter_shares_prefixes_with_nothing_else_not_even_under_its_name(pipeline: Pipeline) -> None:
    await load(pipeline, "new", "/new")
    assert await run(pipeline, "base", "") == 0
    assert await run(pipeline, "base again", "") == 32
    assert await run(pipeline, "given", "given") == 0
    assert await run(pipeline, "given again", "given") == 32
    assert await run(pipeline, "new", "new") == 0
    await load(pipeline, "new", "/other")
    assert await run(pipeline, "replaced", "new") == 0
    # The same files again, under whichever name.
    await load(pipeline, "same", "/new")
    assert await run(pipeline, "same", "same") == 32


async def test_a_name_that_is_not_loaded_is_not_found(pipeline: Pipeline) -> None:
    admission = await submit(pipeline, "one", "absent")
    assert admission.rejected.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
    assert await unload(pipeline, "given")
    assert not await unload(pipeline, "given")
    assert (await submit(pipeline, "two", "given")).rejected.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND


async def test_requests_finish_with_an_adapter_that_is_unloaded_and_then_its_memory_is_freed(
    pipeline: Pipeline,
) -> None:
    for worker in pipeline.workers:
        worker.step_s = 0.01
    digest = (await listed(pipeline))["given"].adapter.digest
    await submit(pipeline, "long", "given", max_tokens=60)
    await until(lambda: pipeline.detokenizer.output_of("long"))
    await unload(pipeline, "given")
    await pipeline.finished("long")
    assert len(pipeline.detokenizer.output_of("long")) > 1
    await until(lambda: all(worker.dropped_adapters == [digest] for worker in pipeline.workers))


async def test_requests_time_out_while_a_worker_does_not_free_an_adapter(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.rank.STATE_TIMEOUT_S", 60.0)
    for worker in pipeline.workers:
        worker.drops.clear()
    await unload(pipeline, "given")
    for worker in pipeline.workers:
        worker.step_s = 60.0
    await pipeline.submit("late", timeout_ms=500)
    await pipeline.finished("late")
    assert not any(worker.dropped_adapters for worker in pipeline.workers)
    for worker in pipeline.workers:
        worker.drops.set()


async def test_workers_that_restart_read_all_adapters_again(pipeline: Pipeline) -> None:
    await load(pipeline, "new", "/new")
    await run(pipeline, "one", "new")
    before = [worker.adapter_reads for worker in pipeline.workers]
    await pipeline.stop_workers()
    for worker in pipeline.workers:
        forget_adapters(worker)
    await pipeline.ready(serving=False)
    await pipeline.start_workers()
    await pipeline.ready()
    assert [worker.adapter_reads - count for worker, count in zip(pipeline.workers, before, strict=True)] == [2, 2]
    assert await run(pipeline, "two", "new") == 0


async def test_adapters_are_read_some_at_a_time_at_the_start(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(2 * READS_AT_ONCE)]
    adapters = {"slots": 2, "load": {name: f"/{name}" for name in names}}
    pipeline = Pipeline(tmp_path, page_size=16, adapters=adapters)
    for worker in pipeline.workers:
        worker.adapter_read_s = 0.05
    await pipeline.start()
    await pipeline.ready()
    try:
        assert [worker.most_adapter_reads for worker in pipeline.workers] == [READS_AT_ONCE] * 2
        assert list(await listed(pipeline)) == sorted(names)
        digests = {state.adapter.digest for state in (await listed(pipeline)).values()}
        assert len(digests) == len(names)
    finally:
        await pipeline.stop()


async def test_an_adapter_that_cannot_be_read_again_is_lost_alone(pipeline: Pipeline) -> None:
    await pipeline.stop_workers()
    await pipeline.ready(serving=False)
    for worker in pipeline.workers:
        worker.adapter_refusal = "its files are gone"
    await pipeline.start_workers()
    await pipeline.ready()
    assert await listed(pipeline) == {}
    assert await run(pipeline, "base", "") == 0


@pytest.mark.parametrize(
    ("name", "source", "pinned", "reason"),
    [("a b", "/x", False, "lora_name"), ("absent", "", True, "not loaded"), ("third", "/x", True, "pinned")],
)
async def test_what_cannot_be_loaded_is_refused(
    pipeline: Pipeline, name: str, source: str, pinned: bool, reason: str
) -> None:
    await load(pipeline, "second", "/y", pinned=True)
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
        await load(pipeline, name, source, pinned=pinned)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_there_are_at_most_so_many_and_only_administrators_change_them(pipeline: Pipeline) -> None:
    for name in ("b", "c"):
        await load(pipeline, name, f"/{name}")
    with pytest.raises(grpc.aio.AioRpcError, match="limit"):
        await load(pipeline, "d", "/d")
    for call in (
        pipeline.stub.LoadAdapter(scheduler_pb2.LoadAdapterRequest(name="b", source="/b"), timeout=30),
        pipeline.stub.UnloadAdapter(scheduler_pb2.UnloadAdapterRequest(name="b"), timeout=30),
        pipeline.stub.ListAdapters(scheduler_pb2.ListAdaptersRequest(), timeout=30),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
async def noting(tmp_path: Path) -> AsyncIterator[Pipeline]:
    """A pipeline whose scheduler keeps a manifest."""
    adapters = {"slots": 2, "load": {"given": "/given"}, "manifest": tmp_path / "adapters.json"}
    made = Pipeline(tmp_path, page_size=16, max_step_tokens=64, adapters=adapters)
    await made.start()
    await made.ready()
    yield made
    await made.stop()


async def die_together(pipeline: Pipeline) -> None:
    """Have all ranks and the scheduler start anew."""
    await pipeline.stop_workers()
    for worker in pipeline.workers:
        forget_adapters(worker)
        worker.process = "second"
    await pipeline.start_workers()
    await pipeline.restart()


async def test_a_scheduler_that_restarts_alone_keeps_pins_and_knows_nothing_of_refused_adapters(
    noting: Pipeline,
) -> None:
    await load(noting, "pinned", "/pinned", pinned=True)
    with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
        await load(noting, "refused", "/refused", pinned=True)
    # The same adapter under another name takes no other slot.
    await load(noting, "again", "/pinned", pinned=True)
    await noting.restart()
    found = await listed(noting)
    assert {name: each.adapter.pinned for name, each in found.items()} == {
        "given": False,
        "pinned": True,
        "again": True,
    }


async def test_what_was_loaded_outlasts_scheduler_and_workers(noting: Pipeline) -> None:
    loaded = await load(noting, "new", "/new")
    await load(noting, "dropped", "/dropped")
    assert await unload(noting, "dropped")
    await load(noting, "new", "", pinned=True)
    await die_together(noting)
    found = await listed(noting)
    assert found.keys() == {"given", "new"}
    assert found["new"].adapter.digest == loaded.digest
    assert found["new"].adapter.pinned
    assert [sorted(worker.adapters) for worker in noting.workers] == [["given", "new"]] * 2
    await run(noting, "one", "new")


async def test_an_adapter_whose_files_have_changed_is_lost_and_the_others_serve(noting: Pipeline) -> None:
    await load(noting, "new", "/new")
    path = noting.settings.scheduler.adapters.manifest
    assert path is not None
    manifest = AdapterManifest(path)
    manifest.write([replace(each, source="/gone") if each.name == "new" else each for each in manifest.read()])
    for worker in noting.workers:
        worker.adapter_files.refused.add("/gone")
    await die_together(noting)
    assert (await listed(noting)).keys() == {"given"}
    await run(noting, "one", "given")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"adapters": 3}', b'{"adapters": [{}]}', b'{"adapters": [{"name": "../x"}]}', b"\xff"],
)
async def test_a_damaged_manifest_leaves_the_settings_adapters(noting: Pipeline, content: bytes) -> None:
    path = noting.settings.scheduler.adapters.manifest
    assert path is not None
    path.write_bytes(content)
    await die_together(noting)
    assert (await listed(noting)).keys() == {"given"}


def test_a_manifest_lists_what_was_written(tmp_path: Path) -> None:
    adapters = [AdapterInfo("one", "/one", "d1", True, 8, 100), AdapterInfo("two", "org/two", "d2")]
    path = tmp_path / "adapters.json"
    AdapterManifest(path).write(adapters)
    assert AdapterManifest(path).read() == adapters
    assert [each.name for each in tmp_path.iterdir()] == ["adapters.json"]
    AdapterManifest(tmp_path / "nowhere" / "adapters.json").write(adapters)
    assert AdapterManifest(tmp_path / "nowhere" / "adapters.json").read() == []
    AdapterManifest(None).write(adapters)
    assert AdapterManifest(None).read() == []


async def test_adapters_are_loaded_and_unloaded_while_the_model_sleeps(pipeline: Pipeline) -> None:
    """Reading takes host memory only; plans load what is used into the slots, which sleep has emptied."""
    await run(pipeline, "before", "given")
    request = scheduler_pb2.SchedulerSleepRequest(level=2, mode=scheduler_pb2.SLEEP_MODE_DRAIN)
    await pipeline.stub.Sleep(request, metadata=ADMIN, timeout=30)
    new = await load(pipeline, "new", "/new")
    await load(pipeline, "dropped", "/dropped")
    assert await unload(pipeline, "dropped")
    await pipeline.stub.WakeUp(scheduler_pb2.SchedulerWakeUpRequest(), metadata=ADMIN, timeout=30)
    given = (await listed(pipeline))["given"].adapter
    await run(pipeline, "one", "given")
    await run(pipeline, "two", "new")
    assert [digest for _, digest in slots_of(pipeline)] == [given.digest, given.digest, new.digest]


async def test_files_that_are_slow_to_read_hold_up_no_other_change(pipeline: Pipeline) -> None:
    slow = asyncio.Event()
    for worker in pipeline.workers:
        worker.adapter_files.slow["/slow"] = slow
    loading = asyncio.create_task(load(pipeline, "slow", "/slow"))
    await until(lambda: all(worker.slow_reads for worker in pipeline.workers))
    await load(pipeline, "new", "/new", pinned=True)
    await load(pipeline, "new", "", pinned=False)
    assert await unload(pipeline, "given")
    assert list(await listed(pipeline)) == ["new"]
    slow.set()
    await loading
    assert list(await listed(pipeline)) == ["new", "slow"]
    await run(pipeline, "one", "slow")


async def test_nothing_is_left_of_a_load_that_is_cancelled(pipeline: Pipeline) -> None:
    """One rank has read the adapter already, the other one has not."""
    pipeline.workers[1].adapter_files.slow["/slow"] = asyncio.Event()
    loading = asyncio.create_task(load(pipeline, "slow", "/slow"))
    await until(lambda: pipeline.workers[1].slow_reads and len(pipeline.workers[0].kept_adapters) == 2)
    loading.cancel()
    found = await listed(pipeline)
    assert list(found) == ["given"]
    await until(lambda: all(worker.kept_adapters == digests_of(found) for worker in pipeline.workers))
    assert [list(worker.adapters) for worker in pipeline.workers] == [["given"]] * 2


async def test_nothing_is_left_of_a_load_that_is_cancelled_while_its_answers_are_on_their_way(
    pipeline: Pipeline,
) -> None:
    found = await listed(pipeline)
    for worker in pipeline.workers:
        worker.adapter_files.answers.clear()
    loading = asyncio.create_task(load(pipeline, "new", "/new"))
    await until(lambda: all(len(worker.kept_adapters) == 2 for worker in pipeline.workers))
    loading.cancel()
    # The scheduler hears of it before it answers a later call.
    assert await listed(pipeline) == found
    for worker in pipeline.workers:
        worker.adapter_files.answers.set()
    await until(lambda: all(worker.kept_adapters == digests_of(found) for worker in pipeline.workers))


async def test_nothing_is_left_of_a_load_that_is_refused_after_reading(pipeline: Pipeline) -> None:
    found = await listed(pipeline)
    pipeline.workers[1].adapter_files.contents["/differs"] = "another"
    with pytest.raises(grpc.aio.AioRpcError, match="different files"):
        await load(pipeline, "differs", "/differs")
    await load(pipeline, "given", "", pinned=True)
    with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
        await load(pipeline, "second", "/second", pinned=True)
    pipeline.workers[1].adapter_files.refused.add("/damaged")
    with pytest.raises(grpc.aio.AioRpcError, match="no such files"):
        await load(pipeline, "damaged", "/damaged")
    await until(lambda: all(worker.kept_adapters == digests_of(found) for worker in pipeline.workers))
    assert [list(worker.adapters) for worker in pipeline.workers] == [["given"]] * 2
    await pipeline.restart()
    assert list(await listed(pipeline)) == ["given"]


async def test_an_adapter_that_is_loaded_under_two_names_stays_when_one_load_is_refused(pipeline: Pipeline) -> None:
    await load(pipeline, "given", "", pinned=True)
    kept = await load(pipeline, "kept", "/same")
    with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
        await load(pipeline, "refused", "/same", pinned=True)
    await load(pipeline, "other", "/other")
    await unload(pipeline, "other")
    # Once this one is freed, the refused one would be, too.
    await until(lambda: all(len(worker.kept_adapters) == 2 for worker in pipeline.workers))
    assert all(kept.digest in worker.kept_adapters for worker in pipeline.workers)
    await run(pipeline, "one", "kept")


async def test_a_scheduler_that_restarts_frees_what_its_predecessor_has_left(pipeline: Pipeline) -> None:
    found = await listed(pipeline)
    for worker in pipeline.workers:
        worker.kept_adapters.add("left")
    await pipeline.restart()
    assert await listed(pipeline) == found
    assert [worker.kept_adapters for worker in pipeline.workers] == [digests_of(found)] * 2
    await run(pipeline, "one", "given")


async def test_ranks_that_miss_a_change_hear_of_it_later(pipeline: Pipeline) -> None:
    await load(pipeline, "new", "/new")
    pipeline.workers[1].refuses_lists = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unload(pipeline, "new")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError):
        await load(pipeline, "third", "/third")
    assert list(await listed(pipeline)) == ["given", "new"]
    await run(pipeline, "one", "new")
    pipeline.workers[1].refuses_lists = False
    await until(lambda: all(sorted(worker.adapters) == ["given", "new"] for worker in pipeline.workers))
    await until(lambda: all(len(worker.kept_adapters) == 2 for worker in pipeline.workers))


async def test_what_is_freed_while_it_is_loaded_again_is_read_again(pipeline: Pipeline) -> None:
    """The memory is freed between reading and giving it a name."""
    first = await load(pipeline, "first", "/same")
    slow = asyncio.Event()
    pipeline.workers[1].adapter_files.slow["/same"] = slow
    loading = asyncio.create_task(load(pipeline, "second", "/same"))
    await until(lambda: pipeline.workers[1].slow_reads == 1)
    await unload(pipeline, "first")
    await until(lambda: all(first.digest not in worker.kept_adapters for worker in pipeline.workers))
    slow.set()
    assert (await loading).digest == first.digest
    assert all(first.digest in worker.kept_adapters for worker in pipeline.workers)
    await run(pipeline, "one", "second")


async def test_pins_of_loaded_adapters_leave_a_slot_for_others(pipeline: Pipeline) -> None:
    await load(pipeline, "new", "/new", pinned=True)
    with pytest.raises(grpc.aio.AioRpcError, match="pinned"):
        await load(pipeline, "given", "", pinned=True)
    await load(pipeline, "new", "", pinned=True)
    await load(pipeline, "new", "", pinned=False)
    await load(pipeline, "given", "", pinned=True)


async def test_a_refused_copy_of_an_adapter_leaves_it_in_memory_while_another_one_is_freed(pipeline: Pipeline) -> None:
    given = (await listed(pipeline))["given"].adapter
    other = await load(pipeline, "other", "/other")
    pipeline.workers[0].adapter_files.contents["/copy"] = "/given"
    pipeline.workers[1].adapter_files.refused.add("/copy")
    for worker in pipeline.workers:
        worker.drops.clear()
    await unload(pipeline, "other")
    await until(lambda: all(worker.waiting_drops for worker in pipeline.workers))
    with pytest.raises(grpc.aio.AioRpcError, match="no such files"):
        await load(pipeline, "copy", "/copy")
    for worker in pipeline.workers:
        worker.drops.set()
    await until(lambda: all(other.digest not in worker.kept_adapters for worker in pipeline.workers))
    # The next one is freed after all that was noted before.
    last = await load(pipeline, "last", "/last")
    await unload(pipeline, "last")
    await until(lambda: all(last.digest in worker.dropped_adapters for worker in pipeline.workers))
    assert [worker.kept_adapters for worker in pipeline.workers] == [{given.digest}] * 2


async def test_memory_that_could_not_be_freed_is_freed_later(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await listed(pipeline)
    await load(pipeline, "new", "/new")
    for worker in pipeline.workers:
        worker.drops.clear()
    await unload(pipeline, "new")
    monkeypatch.setattr("services.scheduler.rank.STATE_TIMEOUT_S", 1.0)
    await until(lambda: all(worker.waiting_drops > 1 for worker in pipeline.workers))
    for worker in pipeline.workers:
        worker.drops.set()
    await until(lambda: all(worker.kept_adapters == digests_of(found) for worker in pipeline.workers))


async def test_loads_that_wait_for_another_change_fill_no_memory(pipeline: Pipeline) -> None:
    await load(pipeline, "other", "/other")
    for worker in pipeline.workers:
        worker.drops.clear()
    await unload(pipeline, "other")
    await until(lambda: all(worker.waiting_drops for worker in pipeline.workers))
    loads = [asyncio.create_task(load(pipeline, f"n{number}", f"/n{number}")) for number in range(3 * READS_AT_ONCE)]
    await until(lambda: all(len(worker.kept_adapters) == 2 + READS_AT_ONCE for worker in pipeline.workers))
    for worker in pipeline.workers:
        worker.drops.set()
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert sum(isinstance(outcome, BaseException) for outcome in outcomes) == len(loads) - 2
    # A place is free while the limit is not reached.
    assert all(worker.adapter_reads <= 2 + READS_AT_ONCE + 2 for worker in pipeline.workers)
    found = await listed(pipeline)
    assert len(found) == 3
    await until(lambda: all(worker.kept_adapters == digests_of(found) for worker in pipeline.workers))


async def test_an_adapter_with_two_names_is_not_lost_with_the_files_of_one(pipeline: Pipeline) -> None:
    for worker in pipeline.workers:
        worker.adapter_files.contents["/copy"] = "/given"
        worker.step_s = 0.01
    await load(pipeline, "copy", "/copy")
    await submit(pipeline, "long", "given", max_tokens=60)
    await until(lambda: pipeline.detokenizer.output_of("long"))
    await pipeline.stop_workers()
    for worker in pipeline.workers:
        forget_adapters(worker)
        worker.adapter_files.refused.add("/copy")
    await pipeline.ready(serving=False)
    await pipeline.start_workers()
    await pipeline.ready()
    await pipeline.finished("long")
    assert not pipeline.detokenizer.finishes["long"].finish.HasField("error")
    assert list(await listed(pipeline)) == ["copy", "given"]
    await run(pipeline, "two", "copy")
