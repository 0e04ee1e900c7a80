"""A rank that shares experts with other groups: it joins their passes between plans, and leaves when one is lost."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from services.scheduler.wire.steps import plan_to_wire
from services.worker.engine.execution.interface import ExpertGroupError
from tests.fakes.engine import ScriptedEngine, wait_for
from tests.services.worker.test_service import OPEN, configure, execute, get_state, until
from tests.waiting import until as waiting_until

if TYPE_CHECKING:
    from tests.services.worker.conftest import Serve


class Calls:
    """Calls that a test makes: numbers of passes, None for the end, or the loss of a rank."""

    def __init__(self) -> None:
        self.made: queue.SimpleQueue[int | ExpertGroupError | None] = queue.SimpleQueue()

    def next_call(self) -> int | None:
        call = self.made.get()
        if isinstance(call, ExpertGroupError):
            raise call
        return call


def raises_lost() -> None:
    raise ExpertGroupError("another rank was lost")


async def test_an_idle_rank_joins_passes_of_other_groups(serve: Serve) -> None:
    calls = Calls()
    engine = ScriptedEngine(pass_calls=calls)
    stub = await serve(engine)
    await configure(stub)
    for number in range(3):
        calls.made.put(number)
    await waiting_until(lambda: engine.calls == ["configure", "join 0", "join 1", "join 2"])
    calls.made.put(None)
    call = stub.Execute()
    (result,) = await execute(call, OPEN)
    assert not result.error
    call.cancel()


async def test_a_call_waits_for_the_plan_that_is_computed(serve: Serve) -> None:
    calls, go_on, begun = Calls(), threading.Event(), threading.Event()
    engine = ScriptedEngine(pass_calls=calls, before_execute=wait_for(go_on, begun))
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    running = execute(call, OPEN)
    calls_before = list(engine.calls)
    calls.made.put(0)
    go_on.set()
    (result,) = await running
    assert not result.error
    assert calls_before == ["configure"]
    await waiting_until(lambda: engine.calls == ["configure", "join 0"])
    calls.made.put(None)
    call.cancel()


@pytest.mark.parametrize("notices", ["by a message", "in a pass of another group", "in its own pass"])
async def test_a_rank_that_lost_another_ends_its_stream_and_can_be_configured_again(serve: Serve, notices: str) -> None:
    calls = Calls()
    engine = ScriptedEngine(pass_calls=calls)
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    if notices == "in its own pass":
        engine.before_execute = raises_lost
    else:
        (result,) = await execute(call, OPEN)
        assert not result.error
        engine.before_join = raises_lost
        calls.made.put(0 if notices == "in a pass of another group" else ExpertGroupError("another rank was lost"))
    if notices == "in its own pass":
        await call.write(plan_to_wire(OPEN))
    with pytest.raises(grpc.aio.AioRpcError, match="another rank was lost") as failed:
        await call.read()
    # Not a failed plan: the requests did nothing to this engine.
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    await until(stub, "FAILED")
    await waiting_until(lambda: engine.calls[-1] == "close")
    engine.before_execute = engine.before_join = lambda: None
    await configure(stub)
    assert (await get_state(stub)).state == "READY"


async def test_a_rank_that_can_meet_others_only_once_asks_for_a_new_process(serve: Serve) -> None:
    import asyncio

    calls, ends = Calls(), asyncio.Event()
    engine = ScriptedEngine(pass_calls=calls)
    stub = await serve(engine, ends=ends)
    await configure(stub)
    engine.ends_with_group = True
    calls.made.put(ExpertGroupError("another rank was lost"))
    async with asyncio.timeout(30):
        await ends.wait()
    assert "close" not in engine.calls
