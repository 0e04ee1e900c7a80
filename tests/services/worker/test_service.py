from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.grammars import Grammar, GrammarKind
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.rpc.status import to_error
from common.steps import EngineSpec, ExpertLoad, StepPlan, StepResult
from common.types import ErrorCode, RowSlot, StepId
from common.wire.requests import grammar_to_wire
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.wire.steps import capacity_from_wire, plan_to_wire, result_from_wire, spec_to_wire
from services.worker.__main__ import NAME
from services.worker.engine.execution.fake_model import FakeOptions, fake_engine
from services.worker.engine.execution.interface import OutOfMemoryError
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars.desk import GrammarDesk, GrammarLimits
from services.worker.grammars.process import CompileProcesses
from services.worker.peers.reading import PeerReader
from services.worker.rank import Rank
from services.worker.service import WorkerService
from tests import waiting
from tests.fakes.engine import ScriptedEngine, raises, wait_for
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

SPEC = EngineSpec("anything", "fake", max_rows=4)
OPEN = StepPlan(StepId(1), opens=(open_row(0, range(5), [0, 1], total=30),), prefills=(chunk(0, 0, 5),))
DECODE = StepPlan(StepId(2), steps=3)
IMBALANCE = "pando_worker_expert_imbalance_ratio"

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.conftest import Serve

    Stub = worker_pb2_grpc.WorkerAsyncStub
    Call = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]


async def configure(stub: Stub, spec: EngineSpec = SPEC) -> list[worker_pb2.ConfigureResponse]:
    return [message async for message in stub.Configure(spec_to_wire(spec), timeout=60)]


async def get_state(stub: Stub) -> worker_pb2.GetWorkerStateResponse:
    return await stub.GetState(worker_pb2.GetWorkerStateRequest(), timeout=30)


async def until(stub: Stub, state: str, *, open_rows: int | None = None) -> None:
    for _ in range(3000):
        now = await get_state(stub)
        if now.state == state and open_rows in (None, now.open_rows):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"the rank is still {now.state} with {now.open_rows} rows")


async def execute(call: Call, plan: StepPlan) -> list[StepResult]:
    """Send a plan and read its results."""
    await call.write(plan_to_wire(plan))
    return await read_plan(call)


async def read_plan(call: Call) -> list[StepResult]:
    results: list[StepResult] = []
    async with asyncio.timeout(30):
        while not results or not results[-1].last:
            message = await call.read()
            assert isinstance(message, worker_pb2.StepResult), "the stream ended before the plan did"
            results.append(result_from_wire(message))
    return results


async def code_of(call: grpc.aio.Call) -> grpc.StatusCode:
    async with asyncio.timeout(30):
        return await call.code()


async def test_configure_reports_progress_and_then_the_capacity(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    *progress, last = await configure(stub)
    assert [(message.progress, message.stage) for message in progress] == [
        (0.5, "half way"), (0.0, "nothing to load"), (1.0, "ready"),
    ]  # fmt: skip
    assert not any(message.HasField("capacity") for message in progress)
    assert capacity_from_wire(last.capacity).page_size == SPEC.page_size
    state = await get_state(stub)
    assert (state.state, state.model, state.world_size) == ("READY", "anything", 1)
    assert state.capacity == last.capacity


async def test_plans_are_carried_out_in_order(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    call = stub.Execute()
    for plan in (OPEN, DECODE, StepPlan(StepId(3), closes=(RowSlot(0),))):
        await call.write(plan_to_wire(plan))
    await call.done_writing()
    results = [result_from_wire(message) async for message in call]
    assert [(result.step_id, result.substep, result.last) for result in results] == [
        (1, 0, True), (2, 0, False), (2, 1, False), (2, 2, True), (3, 0, True),
    ]  # fmt: skip
    assert [result.rows.tolist() for result in results] == [[0], [0], [0], [0], []]
    state = await get_state(stub)
    assert (state.finished_steps, state.open_rows) == (5, 0)
    assert state.heartbeat_age_ms < 5000


async def test_a_plan_that_can_be_abandoned_gives_way_to_a_later_one(serve: Serve) -> None:
    # A pass takes a minute.
    stub = await serve(fake_engine(FakeOptions(step_s=60.0)))
    await configure(stub)
    call = stub.Execute()
    opens = replace(OPEN, can_abandon=True)
    await call.write(plan_to_wire(opens))
    await call.write(plan_to_wire(replace(DECODE, can_abandon=True)))
    await call.write(plan_to_wire(StepPlan(StepId(3), closes=(RowSlot(0),))))
    results = [(await read_plan(call))[-1] for _ in range(3)]
    assert [(result.step_id, result.abandoned) for result in results] == [(1, True), (2, True), (3, False)]
    assert not any(result.rows.size for result in results)
    call.cancel()


async def test_execute_before_configure_is_refused(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    call = stub.Execute()
    assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert "configure" in str(await call.details())


async def test_rows_live_as_long_as_their_stream(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    first = await execute(call, OPEN)
    assert (await get_state(stub)).open_rows == 1
    call.cancel()
    await until(stub, "READY", open_rows=0)
    again = stub.Execute()
    assert tokens_by_row((await execute(again, OPEN))[0]) == tokens_by_row(first[0])
    assert engine.calls == ["configure", "reset"]


async def test_a_newer_stream_takes_over(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    older = stub.Execute()
    await execute(older, OPEN)
    newer = stub.Execute()
    # Row 0 is free again, although the older stream did not close it.
    await execute(newer, OPEN)
    assert await code_of(older) is grpc.StatusCode.ABORTED
    assert await execute(newer, DECODE)


async def test_plans_of_a_stream_that_ended_are_dropped(serve: Serve) -> None:
    begun, go_on = threading.Event(), threading.Event()
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    engine.before_execute = wait_for(go_on, begun)
    call = stub.Execute()
    for step in range(1, 6):
        await call.write(plan_to_wire(StepPlan(StepId(step))))
    assert await asyncio.to_thread(begun.wait, 30)
    newer = stub.Execute()
    assert await code_of(call) is grpc.StatusCode.ABORTED
    go_on.set()
    assert len(await execute(newer, StepPlan(StepId(99)))) == 1
    assert [plan.step_id for plan in engine.plans] == [1, 99]


async def test_a_lease_ends_when_its_stream_does(serve: Serve) -> None:
    passes = 0
    has_blocked, go_on = threading.Event(), threading.Event()

    def sleep(_seconds: float) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            has_blocked.set()
            wait_for(go_on)()

    engine = ScriptedEngine(inner=fake_engine(FakeOptions(step_s=1.0), sleep))
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    opens = (open_row(0, range(5), range(10), total=100),)
    await call.write(plan_to_wire(StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5),), steps=50)))
    await asyncio.to_thread(has_blocked.wait, 10)
    for _ in range(2):
        await call.read()
    newer = stub.Execute()
    assert await code_of(call) is grpc.StatusCode.ABORTED
    go_on.set()
    assert await execute(newer, StepPlan(StepId(2)))
    assert passes == 3


async def test_an_invalid_plan_fails_the_rank_and_configuring_keeps_the_weights(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    (result,) = await execute(call, StepPlan(StepId(7), closes=(RowSlot(3),)))
    assert (result.step_id, result.last) == (7, True)
    assert result.error == "invalid plan: close of row 3, which is not open"
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    assert (await get_state(stub)).state == "FAILED"
    assert await code_of(stub.Execute()) is grpc.StatusCode.FAILED_PRECONDITION
    await configure(stub)
    assert await execute(stub.Execute(), OPEN)
    assert engine.calls == ["configure", "reset", "configure"]


async def test_a_failed_engine_reports_its_error_and_is_closed(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    engine.before_execute = raises(RuntimeError("connection closed by peer"))
    call = stub.Execute()
    for step in (1, 2):
        await call.write(plan_to_wire(StepPlan(StepId(step))))
    (result,) = await read_plan(call)
    assert result.error == "RuntimeError: connection closed by peer"
    # The plan behind it is not even tried.
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    assert engine.plans == []
    assert (await get_state(stub)).state == "FAILED"
    engine.before_execute = lambda: None
    await configure(stub)
    assert await execute(stub.Execute(), OPEN)
    assert engine.calls == ["configure", "close", "configure"]


async def test_ranks_of_a_group_leave_it_when_the_stream_ends(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    grouped = replace(SPEC, world_size=2, rank=1)
    await configure(stub, grouped)
    call = stub.Execute()
    (result,) = await execute(call, OPEN)
    assert result.rows.size == 0
    call.cancel()
    await until(stub, "IDLE")
    assert await code_of(stub.Execute()) is grpc.StatusCode.FAILED_PRECONDITION
    await configure(stub, grouped)
    assert engine.calls == ["configure", "close", "configure"]


@pytest.mark.parametrize("way", ["stream ends", "configured again", "plan fails", "out of memory", "load fails"])
async def test_ranks_that_meet_once_leave_their_group_with_their_process(serve: Serve, way: str) -> None:
    engine = ScriptedEngine(meets_once=True)
    if way == "load fails":
        engine.before_configure = raises(RuntimeError("no weights"))
    ends = asyncio.Event()
    stub = await serve(engine, ends=ends)
    grouped = replace(SPEC, world_size=2)
    if way == "load fails":
        with pytest.raises(grpc.aio.AioRpcError):
            await configure(stub, grouped)
    else:
        await configure(stub, grouped)
        failure = OutOfMemoryError("no room") if way == "out of memory" else RuntimeError("broken")
        if way in ("plan fails", "out of memory"):
            engine.before_execute = raises(failure)
        call = stub.Execute()
        (result,) = await execute(call, OPEN)
        assert bool(result.error) == (way in ("plan fails", "out of memory"))
    if way == "stream ends":
        call.cancel()
    elif way == "configured again":
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await configure(stub, grouped)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "restarting" in str(refused.value.details())
    await asyncio.wait_for(ends.wait(), 30)
    # The thread may wait for other ranks: nobody asks it to.
    assert engine.calls == ["configure"]


async def test_a_single_rank_continues_in_its_process(serve: Serve) -> None:
    ends = asyncio.Event()
    engine = ScriptedEngine(meets_once=True)
    stub = await serve(engine, ends=ends)
    for _ in range(2):
        await configure(stub)
        call = stub.Execute()
        await execute(call, OPEN)
        call.cancel()
    assert not ends.is_set()


async def test_configuring_ends_the_stream_that_runs(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    await configure(stub, replace(SPEC, max_rows=2))
    assert await code_of(call) is grpc.StatusCode.ABORTED
    assert (await get_state(stub)).open_rows == 0


async def test_a_second_configure_is_refused_while_the_first_has_a_caller(serve: Serve) -> None:
    go_on = threading.Event()
    stub = await serve(ScriptedEngine(before_configure=wait_for(go_on)))
    first = asyncio.create_task(configure(stub))
    await until(stub, "CONFIGURING")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await configure(stub)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    go_on.set()
    assert (await first)[-1].HasField("capacity")


async def test_a_configure_whose_caller_disconnected_is_taken_over_by_the_next(serve: Serve) -> None:
    go_on = threading.Event()
    engine = ScriptedEngine(before_configure=wait_for(go_on))
    stub = await serve(engine)
    abandoned = stub.Configure(spec_to_wire(SPEC))
    await abandoned.read()
    abandoned.cancel()
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await configure(stub, replace(SPEC, max_rows=3))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    second = asyncio.create_task(configure(stub))
    await asyncio.sleep(0.5)
    go_on.set()
    assert (await second)[-1].HasField("capacity")
    assert engine.calls == ["configure"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("no such model"), ErrorCode.INVALID_REQUEST),
        (RuntimeError("the other ranks did not come"), ErrorCode.UNAVAILABLE),
    ],
    ids=str,
)
async def test_a_model_that_cannot_be_loaded_is_explained(serve: Serve, error: Exception, code: ErrorCode) -> None:
    engine = ScriptedEngine(before_configure=raises(error))
    stub = await serve(engine)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await configure(stub)
    failure = to_error(failed.value).to_failure()
    assert failure.code is code
    assert str(error) in failure.message
    assert (await get_state(stub)).state == "FAILED"
    engine.before_configure = lambda: None
    assert (await configure(stub))[-1].HasField("capacity")


async def test_a_spec_that_is_incomplete_is_refused(serve: Serve) -> None:
    stub = await serve(ScriptedEngine())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await configure(stub, replace(SPEC, max_rows=0))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await get_state(stub)).state == "IDLE"


async def test_a_hanging_engine_makes_the_process_give_up(serve: Serve) -> None:
    begun, go_on = threading.Event(), threading.Event()
    engine = ScriptedEngine()
    stub = await serve(engine, stuck_after_s=0.2)
    await configure(stub)
    engine.before_execute = wait_for(go_on, begun)
    call = stub.Execute()
    await call.write(plan_to_wire(OPEN))
    assert await asyncio.to_thread(begun.wait, 30)
    await asyncio.sleep(0.1)
    assert (await get_state(stub)).heartbeat_age_ms >= 50
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await configure(stub)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    go_on.set()


@pytest.mark.parametrize(("world_size", "tidied"), [(1, "reset"), (2, "close")])
async def test_out_of_memory_is_reported_as_such_and_a_single_rank_keeps_its_weights(
    serve: Serve, world_size: int, tidied: str
) -> None:
    engine = ScriptedEngine(before_execute=raises(OutOfMemoryError("no room for 4096 tokens")))
    stub = await serve(engine)
    await configure(stub, replace(SPEC, world_size=world_size))
    call = stub.Execute()
    (result,) = await execute(call, OPEN)
    assert result.out_of_memory
    assert result.error == "no room for 4096 tokens"
    assert (await get_state(stub)).state == "FAILED"
    # On the engine's thread.
    await waiting.until(lambda: engine.calls == ["configure", tidied])


async def test_an_idle_rank_is_kept_warm_and_a_busy_one_is_not(serve: Serve) -> None:
    begun, done = threading.Event(), threading.Event()
    engine = ScriptedEngine(before_execute=wait_for(done, begun))
    stub = await serve(engine, keep_warm_s=0.01)
    await asyncio.sleep(0.1)
    assert "keep_warm" not in engine.calls, "it is not configured"
    await configure(stub)
    async with asyncio.timeout(30):
        while engine.calls.count("keep_warm") < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call = stub.Execute()
    await call.write(plan_to_wire(OPEN))
    assert await asyncio.to_thread(begun.wait, 30)
    busy = engine.calls.count("keep_warm")
    await asyncio.sleep(0.1)
    assert engine.calls.count("keep_warm") == busy
    done.set()
    await read_plan(call)


@pytest.mark.timeout(600)  # starting a process takes seconds, and minutes where many others start
async def test_the_first_grammar_after_a_configuration_starts_no_process(tmp_path: Path) -> None:
    library, processes = GrammarLibrary(), CompileProcesses()
    vocabulary = VocabularySource("smollm2-135m-instruct", "auto", 49_152, (2,))
    desk = GrammarDesk(library, processes, GrammarLimits())
    rank = Rank(ScriptedEngine(before_configure=lambda: library.serve(vocabulary)), 60.0)
    server = RpcServer(NAME, f"unix:{tmp_path}/worker.sock")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerService(rank, desk, PeerReader(open_channel)))
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            stages = [message.stage async for message in stub.Configure(spec_to_wire(SPEC), timeout=500)]
            assert stages[-2:] == ["preparing grammars", "ready"]
            template, compiler = processes._template, library._compiler
            assert template is not None
            assert compiler is not None
            assert compiler.done()
            again = spec_to_wire(SPEC)
            again.resumes = True
            assert "preparing grammars" not in [message.stage async for message in stub.Configure(again, timeout=60)]
            message = grammar_to_wire(Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex"))
            await stub.PrepareGrammar(worker_pb2.PrepareGrammarRequest(grammar=message))
            assert processes._template is template
            assert library._compiler is compiler
    finally:
        await server.stop(0.1)
        await desk.close()
        await rank.stop()


async def test_a_grammar_is_given_up_when_its_call_is_cancelled(tmp_path: Path) -> None:
    class Desk:
        """Compiles for ever."""

        def __init__(self) -> None:
            self.asked, self.given_up = asyncio.Event(), asyncio.Event()

        async def prepare(self, grammar: Grammar) -> int:
            self.asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
            return 0

    desk = Desk()
    rank = Rank(fake_engine(FakeOptions()), 10.0)
    server = RpcServer(NAME, f"unix:{tmp_path}/worker.sock")
    service = WorkerService(rank, desk, PeerReader(open_channel))  # type: ignore[arg-type]  # has what the service calls
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            grammar = grammar_to_wire(Grammar(GrammarKind.REGEX, "x", "regex"))
            call = worker_pb2_grpc.WorkerStub(channel).PrepareGrammar(worker_pb2.PrepareGrammarRequest(grammar=grammar))
            async with asyncio.timeout(30):
                reading = asyncio.ensure_future(call)
                await desk.asked.wait()
                reading.cancel()
                await desk.given_up.wait()
    finally:
        await server.stop(0.1)
        await rank.stop()


def tokens_of(expert: int) -> float:
    return REGISTRY.get_sample_value("pando_worker_expert_tokens_total", {"expert": str(expert)}) or 0.0


async def test_metrics_follow_the_tokens_of_experts(serve: Serve) -> None:
    engine = ScriptedEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    before, expected = [tokens_of(6), tokens_of(7)], [0, 0]
    # The counts of the last one are those of an engine which has started again.
    loads = [ExpertLoad(6, (3, 0), 1.5), ExpertLoad(6, (4, 9), 1.25), ExpertLoad(6, (2, 1), 1.0)]
    for plan, load, added in zip((OPEN, DECODE, DECODE), loads, ((3, 0), (1, 9), (2, 1)), strict=True):
        engine.expert_load = load
        await execute(call, plan)
        expected = [total + more for total, more in zip(expected, added, strict=True)]
        await waiting.until(lambda: REGISTRY.get_sample_value(IMBALANCE) == load.imbalance)  # noqa: B023  (awaited here)
        await waiting.until(lambda: [tokens_of(6) - before[0], tokens_of(7) - before[1]] == expected)  # noqa: B023
    call.cancel()
