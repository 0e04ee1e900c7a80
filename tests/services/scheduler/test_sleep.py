"""Workers that are put to sleep and woken while requests run, wait and arrive: nothing is lost, all ranks or none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from services.scheduler.loop import SchedulerLoop
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

DRAIN = scheduler_pb2.SLEEP_MODE_DRAIN
REQUEUE = scheduler_pb2.SLEEP_MODE_REQUEUE
ABORT = scheduler_pb2.SLEEP_MODE_ABORT


def output(max_tokens: int = 8) -> list[int]:
    return expected_output(PROMPT, len(PROMPT) + max_tokens, (STOP_ID,))


def sleep(
    pipeline: Pipeline,
    level: int = 1,
    mode: scheduler_pb2.SleepMode.ValueType = DRAIN,
    *,
    keep_cache: bool = False,
) -> Awaitable[scheduler_pb2.SchedulerSleepResponse]:
    request = scheduler_pb2.SchedulerSleepRequest(level=level, mode=mode, keep_cache=keep_cache)
    return pipeline.stub.Sleep(request, timeout=60, metadata=ADMIN)


def wake(pipeline: Pipeline, *parts: str) -> Awaitable[scheduler_pb2.SchedulerWakeUpResponse]:
    return pipeline.stub.WakeUp(scheduler_pb2.SchedulerWakeUpRequest(parts=parts), timeout=60, metadata=ADMIN)


async def start(pipeline: Pipeline, name: str, max_tokens: int = 30) -> None:
    """Have a request run slowly."""
    for worker in pipeline.workers:
        worker.step_s = 0.02
    await pipeline.submit(name, max_tokens=max_tokens)
    await until(lambda: len(pipeline.detokenizer.output_of(name)) >= 2)


async def is_asleep(pipeline: Pipeline) -> bool:
    state = await pipeline.state()
    return state.worker_group == "SLEEPING" and state.sleep_level > 0


def configurations(pipeline: Pipeline) -> list[int]:
    return [len(worker.configured) for worker in pipeline.workers]


async def with_settings(folder: Path, **scheduler: Any) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(folder, **scheduler)
    await pipeline.start()
    await pipeline.ready()
    yield pipeline
    await pipeline.stop()


@pytest.fixture
async def waking(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async for pipeline in with_settings(tmp_path, sleep={"wake_on_request": True}):
        yield pipeline


@pytest.fixture
async def tiered(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async for pipeline in with_settings(tmp_path, host_tier={"pages": 64, "write_policy": "write_back"}):
        yield pipeline


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async for pipeline in with_settings(tmp_path, sleep={"max_waiting_requests": 1, "timeout_s": 0.5}):
        yield pipeline


async def test_ranks_sleep_although_results_of_the_slower_ones_are_still_missing(pipeline: Pipeline) -> None:
    pipeline.workers[1].step_s = 0.05
    await pipeline.submit("quick", max_tokens=8)
    await pipeline.finished("quick")
    await sleep(pipeline)
    assert await is_asleep(pipeline)
    await wake(pipeline)
    await pipeline.submit("next", max_tokens=8)
    await pipeline.finished("next")
    assert pipeline.detokenizer.output_of("next") == output()
    assert configurations(pipeline) == [1, 1]


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_that_come_while_the_model_sleeps_run_once_it_is_awake(pipeline: Pipeline, level: int) -> None:
    await pipeline.submit("before")
    await pipeline.finished("before")
    answer = await sleep(pipeline, level)
    assert (answer.running_requests, answer.freed_bytes) == (0, 2000)
    assert [worker.slept for worker in pipeline.workers] == [[(level, False)]] * 2
    await pipeline.ready()
    state = await pipeline.state()
    assert (state.worker_group, state.sleep_level, state.wakes_on_request) == ("SLEEPING", level, False)
    plans = len(pipeline.workers[0].plans)
    await pipeline.submit("meanwhile")
    await until_state(pipeline, lambda state: state.waiting_requests == 1)
    assert len(pipeline.workers[0].plans) == plans, "nothing is planned for workers that sleep"
    assert (await wake(pipeline)).is_awake
    await pipeline.finished("meanwhile")
    assert pipeline.detokenizer.output_of("meanwhile") == output()
    assert pipeline.detokenizer.cached["meanwhile"] == 0, "what was cached was given back"
    assert configurations(pipeline) == [1, 1]


async def test_draining_finishes_what_runs_before_the_workers_sleep(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_new, held_back = SchedulerLoop.hold_new, asyncio.Event()

    def hold(loop: SchedulerLoop, *, held: bool) -> None:
        hold_new(loop, held=held)
        held_back.set()

    monkeypatch.setattr(SchedulerLoop, "hold_new", hold)
    await start(pipeline, "running")
    sleeping = asyncio.ensure_future(sleep(pipeline))
    # Calls and streams have no order between them.
    await held_back.wait()
    await pipeline.submit("late")
    await pipeline.finished("running")
    assert (await sleeping).running_requests == 1
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert "late" not in pipeline.detokenizer.finishes
    await wake(pipeline)
    await pipeline.finished("late")
    assert pipeline.detokenizer.output_of("late") == output()


async def test_requeued_requests_continue_with_the_tokens_that_they_had(pipeline: Pipeline) -> None:
    await start(pipeline, "both")
    assert (await sleep(pipeline, 2, REQUEUE)).running_requests == 1
    known = len(pipeline.detokenizer.output_of("both"))
    assert 2 <= known < 30
    await wake(pipeline)
    await pipeline.finished("both")
    assert pipeline.detokenizer.output_of("both") == output(30)


async def test_aborting_ends_what_runs(pipeline: Pipeline) -> None:
    await start(pipeline, "running")
    await sleep(pipeline, 1, ABORT)
    await pipeline.finished("running")
    assert pipeline.detokenizer.finishes["running"].finish.reason == common_pb2.FINISH_REASON_ABORT
    assert await is_asleep(pipeline)


async def test_the_host_tier_keeps_the_cache_if_asked(tiered: Pipeline) -> None:
    await tiered.submit("first")
    await tiered.finished("first")
    await sleep(tiered, 2, keep_cache=True)
    assert [worker.slept for worker in tiered.workers] == [[(2, True)]] * 2
    tiers = {tier.tier: tier for tier in (await tiered.state()).tiers}
    assert tiers["device"].free_pages == tiers["device"].capacity_pages
    assert tiers["host"].evictable_pages > 0
    await wake(tiered)
    await tiered.submit("second")
    await tiered.finished("second")
    assert tiered.detokenizer.output_of("second") == output()
    assert tiered.detokenizer.cached["second"] > 0


async def test_without_being_asked_the_host_tier_is_dropped_too(tiered: Pipeline) -> None:
    await tiered.submit("first")
    await tiered.finished("first")
    await sleep(tiered)
    tiers = {tier.tier: tier for tier in (await tiered.state()).tiers}
    assert all(tier.free_pages == tier.capacity_pages for tier in tiers.values())


async def test_keeping_the_cache_needs_a_host_tier(pipeline: Pipeline) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sleep(pipeline, keep_cache=True)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await pipeline.submit("served")
    await pipeline.finished("served")


@pytest.mark.parametrize("fields", [{"level": 3, "mode": DRAIN}, {"level": 0, "mode": DRAIN}, {"level": 1, "mode": 0}])
async def test_senseless_wishes_are_refused(pipeline: Pipeline, fields: dict[str, int]) -> None:
    request = scheduler_pb2.SchedulerSleepRequest(**fields)  # type: ignore[arg-type]  # enums are integers
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pipeline.stub.Sleep(request, timeout=60, metadata=ADMIN)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wake(pipeline, "everything")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_both_need_the_admin_token(pipeline: Pipeline) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pipeline.stub.Sleep(scheduler_pb2.SchedulerSleepRequest(level=1, mode=DRAIN), timeout=60)
    assert refused.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pipeline.stub.WakeUp(scheduler_pb2.SchedulerWakeUpRequest(), timeout=60)
    assert refused.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    assert not any(worker.slept for worker in pipeline.workers)


async def test_a_second_sleep_changes_nothing_unless_it_is_deeper(pipeline: Pipeline) -> None:
    await sleep(pipeline, 1)
    await sleep(pipeline, 1)
    assert [level for level, _ in pipeline.workers[0].slept] == [1]
    await sleep(pipeline, 2)
    assert [level for level, _ in pipeline.workers[0].slept] == [1, 2]
    assert (await pipeline.state()).sleep_level == 2


async def test_parts_are_woken_one_after_the_other(pipeline: Pipeline) -> None:
    await sleep(pipeline)
    assert not (await wake(pipeline, "weights")).is_awake
    assert await is_asleep(pipeline)
    assert (await wake(pipeline, "kv_cache")).is_awake
    assert [worker.woken for worker in pipeline.workers] == [[("weights",), ("kv_cache",)]] * 2
    assert (await wake(pipeline)).is_awake, "waking what is awake changes nothing"
    await pipeline.submit("served")
    await pipeline.finished("served")


async def test_a_request_wakes_the_model_if_the_settings_say_so(waking: Pipeline) -> None:
    await sleep(waking)
    assert (await waking.state()).wakes_on_request
    waking.workers[0].wakes.clear()
    for name in ("one", "two"):
        await waking.submit(name)
    waking.workers[0].wakes.set()
    await waking.finished("one", "two")
    assert waking.detokenizer.output_of("one") == output()
    assert len(waking.workers[0].woken) == 1
    assert not await is_asleep(waking)


async def test_requests_beyond_the_queue_and_the_timeout_are_told_when_to_retry(impatient: Pipeline) -> None:
    await sleep(impatient)
    await impatient.submit("waits")
    refused = await impatient.submit("too many")
    assert refused.rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert refused.rejected.retry_after_ms > 0
    await impatient.finished("waits")
    error = impatient.detokenizer.finishes["waits"].finish.error
    assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert error.retry_after_ms > 0
    assert await is_asleep(impatient)


async def test_a_rank_that_cannot_sleep_leaves_all_awake(pipeline: Pipeline) -> None:
    pipeline.workers[1].sleep_refusal = "no"
    await start(pipeline, "running")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await sleep(pipeline, 1, REQUEUE)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert configurations(pipeline) == [2, 2], "both are configured again"


async def test_ranks_that_cannot_be_woken_are_loaded_again(pipeline: Pipeline) -> None:
    await sleep(pipeline)
    pipeline.workers[1].wake_refusal = "no"
    assert (await wake(pipeline)).is_awake
    await pipeline.submit("served")
    await pipeline.finished("served")
    assert configurations(pipeline) == [2, 2]


async def test_a_model_that_cannot_be_loaded_sleeps_on(pipeline: Pipeline) -> None:
    await sleep(pipeline, 2)
    for worker in pipeline.workers:
        worker.wake_refusal, worker.refusal = "no", "the files are gone"
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await wake(pipeline)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the files are gone" in (failed.value.details() or "")
    assert await is_asleep(pipeline)
    for worker in pipeline.workers:
        worker.wake_refusal = worker.refusal = None
    assert (await wake(pipeline)).is_awake
    await pipeline.submit("served")
    await pipeline.finished("served")


async def test_workers_that_die_asleep_come_back_asleep(pipeline: Pipeline) -> None:
    await pipeline.submit("before")
    await pipeline.finished("before")
    await sleep(pipeline)
    await pipeline.stop_workers()
    for worker in pipeline.workers:
        worker.process, worker.sleep_level = "second", 0
    await pipeline.submit("meanwhile")
    await pipeline.start_workers()
    await asyncio.sleep(0.5)
    assert configurations(pipeline) == [1, 1], "nothing is loaded for a model that sleeps"
    assert await is_asleep(pipeline)
    await pipeline.ready()
    assert (await wake(pipeline)).is_awake
    await pipeline.finished("meanwhile")
    assert pipeline.detokenizer.output_of("meanwhile") == output()
    assert pipeline.detokenizer.cached["meanwhile"] == 0
    assert configurations(pipeline) == [2, 2]


async def test_a_scheduler_that_is_restarted_leaves_its_workers_asleep(pipeline: Pipeline) -> None:
    await sleep(pipeline, 2)
    await pipeline.restart()
    assert await is_asleep(pipeline)
    assert (await pipeline.state()).sleep_level == 2
    refused = await pipeline.submit("early")
    assert refused.rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert configurations(pipeline) == [1, 1]
    assert (await wake(pipeline)).is_awake
    await pipeline.submit("served")
    await pipeline.finished("served")
    assert configurations(pipeline) == [2, 2]


async def test_a_rank_that_is_lost_while_a_restarted_scheduler_wakes_it_is_tried_again(pipeline: Pipeline) -> None:
    await sleep(pipeline)
    await pipeline.restart()
    rank = pipeline.workers[1]
    # Its connection breaks before it has begun to load.
    rank.failures_to_configure = 1
    assert (await wake(pipeline)).is_awake
    assert rank.failures_to_configure == 0
    await pipeline.submit("after")
    await pipeline.finished("after")
    assert pipeline.detokenizer.output_of("after") == output()


async def test_weights_are_not_replaced_while_the_model_sleeps_nor_does_it_sleep_meanwhile(pipeline: Pipeline) -> None:
    update = scheduler_pb2.UpdateWeightsRequest(model="newer", mode=scheduler_pb2.WEIGHTS_UPDATE_MODE_DRAIN)
    await start(pipeline, "running")
    replacing = asyncio.ensure_future(pipeline.stub.UpdateWeights(update, timeout=60, metadata=ADMIN))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sleep(pipeline)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await replacing
    await sleep(pipeline)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pipeline.stub.UpdateWeights(update, timeout=60, metadata=ADMIN)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "wake" in (refused.value.details() or "")


async def test_the_load_tells_tokenizers_that_the_group_sleeps(pipeline: Pipeline) -> None:
    await sleep(pipeline)
    await pipeline.submit("meanwhile")
    await until(lambda: pipeline.loads[-1].sleeps and not pipeline.loads[-1].serves)
    await wake(pipeline)
    await pipeline.finished("meanwhile")
    await pipeline.submit("later")
    assert (pipeline.loads[-1].serves, pipeline.loads[-1].sleeps) == (True, False)
