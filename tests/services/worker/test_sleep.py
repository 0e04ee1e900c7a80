"""A rank that sleeps and wakes between the plans of a stream, which stays open."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from common.steps import StepPlan
from common.types import RowSlot, StepId
from protos.gen.pando.v1 import worker_pb2
from tests.fakes.engine import ScriptedEngine, nothing, raises, wait_for
from tests.services.worker.engine.scenario import tokens_by_row
from tests.services.worker.test_service import DECODE, OPEN, configure, execute, get_state, until

if TYPE_CHECKING:
    from tests.services.worker.conftest import Serve
    from tests.services.worker.test_service import Stub

CLOSE = StepPlan(StepId(3), closes=(RowSlot(0),))


async def sleep(stub: Stub, level: int = 1) -> worker_pb2.WorkerSleepResponse:
    return await stub.Sleep(worker_pb2.WorkerSleepRequest(level=level), timeout=30)


async def wake(stub: Stub, *parts: str) -> bool:
    return (await stub.WakeUp(worker_pb2.WorkerWakeUpRequest(parts=parts), timeout=30)).is_awake


@pytest.mark.parametrize("level", [1, 2])
async def test_a_stream_goes_on_after_the_rank_has_slept(serve: Serve, level: int) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    before = [tokens_by_row(result) for result in await execute(call, DECODE)]
    await execute(call, CLOSE)
    assert (await sleep(stub, level)).freed_bytes == 1000
    state = await get_state(stub)
    assert (state.state, state.sleep_level) == ("SLEEPING", level)
    assert await wake(stub)
    state = await get_state(stub)
    assert (state.state, state.sleep_level) == ("READY", 0)
    await execute(call, OPEN)
    assert [tokens_by_row(result) for result in await execute(call, DECODE)] == before
    call.cancel()


async def test_a_rank_that_sleeps_lends_no_pages(serve: Serve) -> None:
    """A lease would outlast the sleep, after which the pages belong to others."""
    stub = await serve(ScriptedEngine())
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    await execute(call, CLOSE)
    request = worker_pb2.GrantPagesRequest(lease=b"l" * 16, device_pages=[0])
    await sleep(stub)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GrantPages(request, timeout=30)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await wake(stub)
    await stub.GrantPages(request, timeout=30)
    call.cancel()


async def test_rows_must_be_closed_before(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sleep(stub)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert len(await execute(call, DECODE)) == 3
    call.cancel()


async def test_a_rank_without_a_model_neither_sleeps_nor_wakes(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    for call in (sleep, wake):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(stub)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("level", [0, 3])
async def test_unknown_levels_and_parts_are_refused(serve: Serve, level: int) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sleep(stub, level)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wake(stub, "all")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_parts_are_restored_one_by_one(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    await sleep(stub)
    assert not await wake(stub, "weights")
    assert (await get_state(stub)).state == "SLEEPING"
    assert await wake(stub, "kv_cache")
    assert await wake(stub, "kv_cache"), "waking what is awake changes nothing"


async def test_a_rank_that_fails_to_sleep_has_to_be_configured_again(serve: Serve) -> None:
    engine = ScriptedEngine(before_sleep=raises(RuntimeError("no")))
    stub = await serve(engine)
    await configure(stub)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await sleep(stub)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await get_state(stub)).state == "FAILED"
    engine.before_sleep = nothing
    await configure(stub)
    assert (await get_state(stub)).state == "READY"


async def test_a_rank_sleeps_on_when_its_scheduler_is_gone_and_is_woken_by_a_configuration(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    await execute(call, CLOSE)
    await sleep(stub, 2)
    call.cancel()
    await asyncio.sleep(0.1)
    state = await get_state(stub)
    assert (state.state, state.sleep_level) == ("SLEEPING", 2)
    await configure(stub)
    assert (await get_state(stub)).state == "READY"
    call = stub.Execute()
    assert await execute(call, OPEN)
    call.cancel()


async def test_sleep_goes_on_if_its_caller_gives_up(serve: Serve) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    stub = await serve(ScriptedEngine(before_sleep=wait_for(goes_on, begun)))
    await configure(stub)
    call = stub.Sleep(worker_pb2.WorkerSleepRequest(level=1), timeout=30)
    await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    goes_on.set()
    await until(stub, "SLEEPING")
