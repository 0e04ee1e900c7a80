"""Two schedulers with fake workers that share a device: who is awake, what becomes of requests, and of the dead."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from services.scheduler import turn_desk
from tests.services.scheduler.pipeline import ADMIN, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

QUICK = {"min_turn_s": 0.1, "idle_s": 0.1}
LONG = {"min_turn_s": 600.0, "idle_s": 0.1}


class Models:
    """Two models that share a device, and the number of times that both were seen awake."""

    def __init__(self, first: Pipeline, second: Pipeline) -> None:
        self.first = first
        self.second = second
        self.both_awake = 0

    async def watch(self) -> None:
        while True:
            self.both_awake += is_awake(self.first) and is_awake(self.second)
            await asyncio.sleep(0.002)


def is_awake(model: Pipeline) -> bool:
    return any(worker.configured and not worker.sleep_level for worker in model.workers)


@asynccontextmanager
async def sharing(tmp_path: Path, turns: dict[str, Any], **scheduler: Any) -> AsyncIterator[Models]:
    """Start two models one after the other; check that never both were awake."""
    async with AsyncExitStack() as stack:
        pipelines = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            settings = {"enabled": True, "directory": tmp_path / "turns", **turns}
            pipeline = Pipeline(tmp_path / name, device_turns=settings, **scheduler)
            for worker in pipeline.workers:
                worker.step_s = 0.01
            await pipeline.start()
            stack.push_async_callback(pipeline.stop)
            pipelines.append(pipeline)
        for pipeline in pipelines:
            await pipeline.ready()
        models = Models(*pipelines)
        watching = asyncio.create_task(models.watch())
        stack.callback(watching.cancel)
        yield models
        assert models.both_awake == 0


async def hold(model: Pipeline, name: str) -> None:
    """Have a model begin a request that lasts."""
    await model.submit(name, max_tokens=90)
    await until(lambda: model.detokenizer.output_of(name))


async def test_requests_of_both_models_finish_with_the_same_tokens_as_alone(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = Pipeline(tmp_path / "alone")
    await alone.start()
    await alone.ready()
    await alone.submit("one", max_tokens=60)
    await alone.finished("one")
    wanted = alone.detokenizer.output_of("one")
    await alone.stop()
    assert len(wanted) > 30
    async with sharing(tmp_path, QUICK) as models:
        for model in (models.first, models.second):
            await model.submit("one", max_tokens=60)
        for model in (models.first, models.second):
            await model.finished("one")
            assert model.detokenizer.output_of("one") == wanted
            # Each was put to sleep while its request ran, and woken for it.
            assert all(len(worker.slept) >= 2 for worker in model.workers)
            assert (await model.state()).wakes_on_request


async def test_a_model_that_nobody_waits_for_stays_awake(tmp_path: Path) -> None:
    async with sharing(tmp_path, QUICK) as models:
        await models.first.submit("one", max_tokens=4)
        await models.first.finished("one")
        sleeps = len(models.first.workers[0].slept)
        await asyncio.sleep(0.5)
        assert is_awake(models.first)
        await models.first.submit("two", max_tokens=4)
        await models.first.finished("two")
        assert len(models.first.workers[0].slept) == sleeps


async def test_so_many_requests_wait_and_so_long(tmp_path: Path) -> None:
    async with sharing(tmp_path, LONG, sleep={"max_waiting_requests": 1, "timeout_s": 0.5}) as models:
        for worker in models.first.workers:
            worker.step_s = 0.1
        await hold(models.first, "long")
        assert not (await models.second.submit("waits")).HasField("rejected")
        refused = (await models.second.submit("too many")).rejected
        assert refused.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert refused.retry_after_ms > 0
        await models.second.finished("waits")
        assert models.second.detokenizer.finishes["waits"].finish.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert is_awake(models.first)


async def test_the_turn_of_a_scheduler_that_ends_is_taken_by_the_next(tmp_path: Path) -> None:
    async with sharing(tmp_path, LONG) as models:
        await hold(models.first, "long")
        await models.second.submit("waits", max_tokens=4)
        for worker in models.first.workers:
            worker.configured.clear()  # as real ones unload their model without a scheduler
        models.first.running.cancel()
        await models.second.finished("waits")
        assert len(models.second.detokenizer.output_of("waits")) == 4


async def test_a_turn_in_which_the_workers_die_goes_to_the_next(tmp_path: Path) -> None:
    async with sharing(tmp_path, QUICK) as models:
        await hold(models.first, "long")
        await models.first.stop_workers()
        for worker in models.first.workers:
            worker.configured.clear()
            worker.process = "another"
        await models.second.submit("waits", max_tokens=4)
        await models.second.finished("waits")
        await models.first.start_workers()
        await models.first.finished("long")
        assert len(models.first.detokenizer.output_of("long")) > 30


async def test_a_model_that_cannot_be_woken_does_not_keep_the_device(tmp_path: Path) -> None:
    async with sharing(tmp_path, {**QUICK, "wake_timeout_s": 0.5}) as models:
        await hold(models.first, "before")
        await models.first.finished("before")
        await models.second.stop_workers()
        for worker in models.second.workers:
            worker.configured.clear()
            worker.process = "another"
        await models.second.submit("lost", max_tokens=4)
        await asyncio.sleep(1.0)
        for name in ("one", "two"):
            await models.first.submit(name, max_tokens=4)
            await models.first.finished(name)
        await models.second.start_workers()
        await models.second.finished("lost")
        assert len(models.second.detokenizer.output_of("lost")) == 4


async def test_a_model_whose_workers_fail_again_and_again_lets_the_other_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are started again at once, as separate services are, answer whenever they are looked for."""
    monkeypatch.setattr(turn_desk, "RETRY_S", 0.1)
    async with sharing(tmp_path, {**QUICK, "wake_timeout_s": 600.0}) as models:
        await hold(models.first, "before")
        await models.first.finished("before")
        await models.second.stop_workers()
        for worker in models.second.workers:
            worker.configured.clear()
            worker.process, worker.failures_to_configure = "another", 1_000_000
        await models.second.start_workers()

        def attempts_left() -> int:
            return sum(worker.failures_to_configure for worker in models.second.workers)

        await models.second.submit("crashes", max_tokens=4)
        for name in ("one", "two", "three"):
            left = attempts_left()
            await until(lambda left=left: attempts_left() < left)  # type: ignore[misc]  # mypy cannot infer it
            await models.first.submit(name, max_tokens=4)
            await models.first.finished(name)
        for worker in models.second.workers:
            worker.failures_to_configure = 0
        await models.second.finished("crashes")
        assert len(models.second.detokenizer.output_of("crashes")) == 4


async def test_only_turns_put_such_a_model_to_sleep_or_wake_it(tmp_path: Path) -> None:
    async with sharing(tmp_path, QUICK) as models:
        sleep = scheduler_pb2.SchedulerSleepRequest(level=1, mode=scheduler_pb2.SLEEP_MODE_DRAIN)
        for call in (
            models.first.stub.Sleep(sleep, metadata=ADMIN, timeout=30),
            models.first.stub.WakeUp(scheduler_pb2.SchedulerWakeUpRequest(), metadata=ADMIN, timeout=30),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="by turns") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_a_directory_it_does_not_start(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, device_turns={"enabled": True})
    await pipeline.start()
    with pytest.raises(Exception, match=r"requires scheduler\.device_turns\.directory"):
        await pipeline.running
    await pipeline.stop()
