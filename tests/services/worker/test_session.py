from __future__ import annotations

import asyncio

import pytest

from common.steps import PrefillChunk, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.session import MAX_OPEN_PLANS, ExecuteSession


def plan(step: int) -> StepPlan:
    return StepPlan(StepId(step))


def result(step: int, *, last: bool = True) -> StepResult:
    return StepResult(StepId(step), 0, last)


async def test_plans_wait_while_too_many_are_open() -> None:
    dispatched: list[int] = []
    session = ExecuteSession(lambda _session, given: dispatched.append(given.step_id))

    async def submit_all() -> None:
        for step in range(MAX_OPEN_PLANS + 2):
            await session.submit(plan(step))

    submitting = asyncio.create_task(submit_all())
    await asyncio.sleep(0)
    assert len(dispatched) == MAX_OPEN_PLANS
    results = session.results()
    # Only the end of a plan makes room, and only once it is consumed.
    session.deliver(result(0, last=False))
    session.deliver(result(0))
    session.deliver(result(1))
    for _ in range(3):
        await anext(results)
        await asyncio.sleep(0)
    assert len(dispatched) == MAX_OPEN_PLANS + 1
    session.deliver(result(2))
    await anext(results)
    await submitting
    assert len(dispatched) == MAX_OPEN_PLANS + 2


async def test_results_end_after_those_of_the_last_plan() -> None:
    session = ExecuteSession(lambda _session, _plan: None)
    await session.submit(plan(1))
    session.finish_input()
    session.deliver(result(1, last=False))
    session.deliver(result(1))
    assert [got.last async for got in session.results()] == [False, True]


async def test_an_error_comes_after_the_delivered_results() -> None:
    session = ExecuteSession(lambda _session, _plan: None)
    await session.submit(plan(1))
    session.deliver(result(1, last=False))
    session.end(RuntimeError("lost"))
    results = session.results()
    assert (await anext(results)).step_id == 1
    with pytest.raises(RuntimeError, match="lost"):
        await anext(results)


async def test_nothing_is_dispatched_after_the_end() -> None:
    dispatched: list[StepPlan] = []
    session = ExecuteSession(lambda _session, given: dispatched.append(given))
    session.end()
    await session.submit(plan(1))
    assert dispatched == []
    assert [got async for got in session.results()] == []


async def test_a_plan_is_overtaken_by_what_need_not_wait_for_it() -> None:
    session = ExecuteSession(lambda _session, _plan: None)
    prompts = (PrefillChunk(RowSlot(0), 0, 8),)
    abandoned = StepPlan(StepId(2), prefills=prompts, can_abandon=True)
    shortened = StepPlan(StepId(3), steps=8, can_shorten=True)
    for given in (plan(1), abandoned, shortened):
        await session.submit(given)
    # By a later plan of other rows, and by none without prompts.
    assert session.is_overtaken(abandoned)
    assert not session.is_overtaken(shortened)
    await session.submit(plan(4))
    assert not session.is_overtaken(shortened)
    await session.submit(StepPlan(StepId(5), prefills=prompts))
    assert session.is_overtaken(shortened)
    assert not session.is_overtaken(StepPlan(StepId(6), steps=8, can_shorten=True))
