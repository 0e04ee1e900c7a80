from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.deltas import Delta, PromptUsage
from common.errors import RequestFailedError
from common.requests import GenerateRequest
from common.sampling import choice_seed
from common.types import (
    Admission,
    ErrorCode,
    Finish,
    FinishReason,
    RequestFailure,
    RequestId,
    RequestOptions,
    Resume,
    SamplingParams,
    SessionTurn,
    StopConditions,
    Subject,
    View,
)
from gateway.generation.generation import Generation
from gateway.generation.journal import ChoiceRecord, JournalEntry, ResumePolicy
from gateway.metrics import GatewayMetrics
from tests.fakes.pipeline import LENGTH, STOP, FakePipeline

ID = RequestId("cmpl-1")
AWAY = RequestFailure(ErrorCode.UNAVAILABLE, "the worker went away", retryable=True)
FULL = RequestFailure(ErrorCode.QUEUE_FULL, "full", retryable=True)
DEFECT = RequestFailure(ErrorCode.INTERNAL, "a defect")
BROKEN = Finish(FinishReason.ERROR, error=AWAY)
QUICK = ResumePolicy(attempts=2, burst_s=0.0, deadline_s=30.0, first_delay_s=0.001, max_delay_s=0.01)


def request(n: int = 1, **stop: Any) -> GenerateRequest:
    options = RequestOptions(SamplingParams(seed=5), StopConditions(**stop), n=n)
    return GenerateRequest(ID, View(Subject("t", "u")), "tiny", "Hello", options)


def begin(
    pipeline: FakePipeline, *requests: GenerateRequest, policy: ResumePolicy = QUICK, **options: Any
) -> Generation:
    entries, first = [], 0
    for one in requests or (request(),):
        entries.append(JournalEntry(one, first))
        first += one.options.n
    generation = Generation(pipeline, entries, policy, GatewayMetrics(CollectorRegistry()), **options)
    generation.start()
    return generation


def tokens(request_id: str, choice: int, first: int, text: str, *ids: int, finish: Finish | None = None) -> Delta:
    return Delta(RequestId(request_id), choice, first, ids, text, finish=finish)


async def read(generation: Generation) -> str:
    text = ""
    async with asyncio.timeout(30):
        while updates := await generation.next_updates():
            text += "".join(update.text for update in updates)
    return text


async def test_choice_goes_on_where_it_was_interrupted() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(Admission(ID, 7))
    pipeline.tell(tokens(ID, 0, 0, "Hel", 1, 2))
    pipeline.tell(tokens(ID, 0, 2, "", finish=BROKEN))
    again = (await pipeline.submissions(2))[1]
    assert again.options.resume == Resume((1, 2), 3)
    assert again.request_id != ID
    pipeline.tell(tokens(again.request_id, 0, 2, "lo", 3, finish=STOP))
    assert await read(generation) == "Hello"
    assert generation.usage.completion_tokens == 3


@pytest.mark.parametrize("generated", [(), (1, 2)])
async def test_a_turn_of_a_session_goes_on_with_the_conversation_before_it(generated: tuple[int, ...]) -> None:
    pipeline = FakePipeline()
    turn = SessionTurn("two", after="one")
    options = RequestOptions(SamplingParams(seed=5), session="chat", turn=turn)
    generation = begin(pipeline, replace(request(), options=options))
    pipeline.tell(Admission(ID, 9, conversation_ids=(7, 8, 9)))
    if generated:
        pipeline.tell(tokens(ID, 0, 0, "Hel", *generated))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(2))[1]
    assert again.options.turn == replace(turn, conversation_ids=(7, 8, 9))
    assert again.options.session == "chat"
    # The scheduler that goes on ends, too.
    pipeline.tell(Admission(again.request_id, 9))
    pipeline.lose(again.request_id, AWAY)
    assert (await pipeline.submissions(3))[2].options.turn == again.options.turn
    generation.close()


async def test_a_lost_submission_is_resumed_without_an_abort() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(tokens(ID, 0, 0, "Hel", 1))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(2))[1]
    pipeline.tell(tokens(ID, 0, 1, "XXX", 9))  # still from before
    pipeline.tell(tokens(again.request_id, 0, 1, "lo", 2, finish=STOP))
    assert await read(generation) == "Hello"
    assert pipeline.aborted == []


async def test_each_choice_continues_alone_with_its_own_seed() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline, request(n=3))
    pipeline.tell(tokens(ID, 0, 0, "a", 1, finish=STOP))
    pipeline.tell(tokens(ID, 1, 0, "b", 2))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(3))[1:]
    assert [one.options.n for one in again] == [1, 1]
    assert [one.options.sampling.seed for one in again] == [choice_seed(5, 1), choice_seed(5, 2)]
    assert [one.options.resume for one in again] == [Resume((2,), 1), None]
    pipeline.tell(tokens(again[0].request_id, 0, 1, "B", 3, finish=STOP))
    pipeline.tell(tokens(again[1].request_id, 0, 0, "c", 4, finish=STOP))
    assert await read(generation) == "abBc"
    assert [len(choice.token_ids) for choice in generation.entries[0].choices] == [1, 2, 1]


async def test_one_failed_choice_does_not_disturb_the_others() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline, request(n=2))
    pipeline.tell(tokens(ID, 0, 0, "a", 1))
    pipeline.tell(tokens(ID, 1, 0, "b", 2))
    pipeline.tell(tokens(ID, 1, 1, "", finish=BROKEN))
    again = (await pipeline.submissions(2))[1]
    pipeline.lose(ID, AWAY)  # concerns choice 0 only: choice 1 has moved on
    other = (await pipeline.submissions(3))[2]
    assert (again.options.resume, other.options.resume) == (Resume((2,), 1), Resume((1,), 1))
    pipeline.tell(tokens(again.request_id, 0, 1, "B", 3, finish=STOP))
    pipeline.tell(tokens(other.request_id, 0, 1, "A", 4, finish=STOP))
    assert sorted(await read(generation)) == ["A", "B", "a", "b"]


async def test_other_failures_end_the_request_and_abort_the_rest() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline, request(n=2))
    pipeline.tell(tokens(ID, 0, 0, "a", 1))
    pipeline.tell(tokens(ID, 0, 1, "", finish=Finish(FinishReason.ERROR, error=DEFECT)))
    assert [update.text for update in await generation.next_updates() or ()] == ["a"]
    with pytest.raises(RequestFailedError, match="a defect"):
        await generation.next_updates()
    assert pipeline.aborted == [ID]
    assert len(pipeline.submitted) == 1


async def test_attempts_after_admission_are_bounded() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    for number in range(QUICK.attempts + 1):
        one = (await pipeline.submissions(number + 1))[number]
        pipeline.tell(Admission(one.request_id, 7))
        pipeline.tell(tokens(one.request_id, 0, 0, "", finish=BROKEN))
    with pytest.raises(RequestFailedError, match="went away"):
        await read(generation)
    assert len(pipeline.submitted) == QUICK.attempts + 1


async def test_a_burst_of_failures_before_the_first_token_ends_nothing() -> None:
    pipeline = FakePipeline()
    policy = replace(QUICK, burst_s=20.0)
    generation = begin(pipeline, policy=policy)
    failures = 5 * policy.attempts
    for number in range(failures):
        latest = (await pipeline.submissions(number + 1))[-1]
        pipeline.tell(Admission(latest.request_id, 7))
        pipeline.lose(latest.request_id, AWAY)
    latest = (await pipeline.submissions(failures + 1))[-1]
    pipeline.tell(tokens(latest.request_id, 0, 0, "Hello", 1, finish=STOP))
    assert await read(generation) == "Hello"


def test_attempts_count_once_failures_have_lasted_longer_than_a_burst() -> None:
    policy = ResumePolicy()
    choice = ChoiceRecord(request(), 0, 0)
    choice.was_admitted, choice.failures, choice.interrupted_at = True, policy.attempts, 100.0
    late = 100.0 + policy.burst_s
    assert policy.delay(choice, AWAY, late) is not None
    choice.failures += 1
    assert policy.delay(choice, AWAY, late - 0.001) is not None
    assert policy.delay(choice, AWAY, late) is None


async def test_progress_resets_the_attempts() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    failures = 3 * QUICK.attempts
    for number in range(failures):
        one = (await pipeline.submissions(number + 1))[number]
        pipeline.tell(tokens(one.request_id, 0, number, "x", number))
        pipeline.tell(tokens(one.request_id, 0, number + 1, "", finish=BROKEN))
    last = (await pipeline.submissions(failures + 1))[failures]
    pipeline.tell(tokens(last.request_id, 0, failures, "y", failures, finish=STOP))
    assert await read(generation) == "x" * failures + "y"


async def test_a_resubmission_carries_the_engine_failures_since_the_last_token() -> None:
    pipeline = FakePipeline()
    begin(pipeline)
    suspected = Finish(FinishReason.ERROR, error=replace(AWAY, engine_failures=2))
    pipeline.tell(tokens(ID, 0, 0, "", finish=suspected))
    second = (await pipeline.submissions(2))[1]
    assert second.options.engine_failures == 2
    pipeline.tell(tokens(second.request_id, 0, 0, "", finish=BROKEN))
    third = (await pipeline.submissions(3))[2]
    assert third.options.engine_failures == 2
    pipeline.tell(tokens(third.request_id, 0, 0, "x", 1))
    pipeline.tell(tokens(third.request_id, 0, 1, "", finish=BROKEN))
    assert (await pipeline.submissions(4))[3].options.engine_failures == 0


async def test_a_delta_without_a_token_is_no_progress() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    for number in range(QUICK.attempts + 1):
        one = (await pipeline.submissions(number + 1))[number]
        pipeline.tell(tokens(one.request_id, 0, 0, ""))
        pipeline.tell(tokens(one.request_id, 0, 0, "", finish=BROKEN))
    with pytest.raises(RequestFailedError):
        await read(generation)


def test_a_new_request_is_as_patient_as_an_admitted_one() -> None:
    policy = ResumePolicy()
    new, admitted = ChoiceRecord(request(), 0, 0), ChoiceRecord(request(), 0, 0)
    admitted.was_admitted = True
    new.interrupted_at = admitted.interrupted_at = 100.0
    for waited in (1.0, 11.0, 120.0, 590.0, 601.0):
        delays = [policy.delay(choice, AWAY, 100.0 + waited) for choice in (new, admitted)]
        assert delays == [None if waited > 600 else policy.first_delay_s] * 2


async def test_a_new_request_is_submitted_until_it_is_admitted() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    refusals = 3 * QUICK.attempts
    for number in range(refusals):
        one = (await pipeline.submissions(number + 1))[number]
        pipeline.tell(Admission(one.request_id, 0, AWAY))
    last = (await pipeline.submissions(refusals + 1))[refusals]
    pipeline.tell(tokens(last.request_id, 0, 0, "a", 1, finish=STOP))
    assert await read(generation) == "a"


async def test_a_new_request_fails_at_the_deadline() -> None:
    pipeline = FakePipeline(lambda one: [Admission(one.request_id, 0, AWAY)])
    generation = begin(pipeline, policy=replace(QUICK, deadline_s=0.05))
    with pytest.raises(RequestFailedError, match="went away"):
        await read(generation)


async def test_a_new_request_at_a_full_queue_fails_at_once() -> None:
    pipeline = FakePipeline(lambda one: [Admission(one.request_id, 0, FULL)])
    with pytest.raises(RequestFailedError, match="full"):
        await read(begin(pipeline))
    assert len(pipeline.submitted) == 1


async def test_resumed_choice_waits_at_a_full_queue() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(tokens(ID, 0, 0, "a", 1))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(2))[1]
    pipeline.tell(Admission(again.request_id, 0, FULL))
    third = (await pipeline.submissions(3))[2]
    pipeline.tell(tokens(third.request_id, 0, 1, "b", 2, finish=STOP))
    assert await read(generation) == "ab"


async def test_a_choice_that_lost_only_its_finish_is_finished_by_the_gateway() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline, request(max_tokens=2))
    pipeline.tell(tokens(ID, 0, 0, "ab", 1, 2))
    pipeline.lose(ID, AWAY)
    async with asyncio.timeout(30):
        updates = [*(await generation.next_updates() or ()), *(await generation.next_updates() or ())]
    assert updates[-1].finish == LENGTH
    assert len(pipeline.submitted) == 1


async def test_missing_tokens_are_fetched_again() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(tokens(ID, 0, 0, "a", 1))
    pipeline.tell(tokens(ID, 0, 2, "c", 3))
    again = (await pipeline.submissions(2))[1]
    assert pipeline.aborted == [ID]
    pipeline.tell(tokens(again.request_id, 0, 1, "bc", 2, 3, finish=STOP))
    assert await read(generation) == "abc"


async def test_a_silent_request_is_treated_as_lost() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(Admission(ID, 7))
    generation.end_silence(3600.0)
    assert pipeline.aborted == []
    await asyncio.sleep(0.01)
    generation.end_silence(0.001)
    assert pipeline.aborted == [ID]
    again = (await pipeline.submissions(2))[1]
    pipeline.tell(tokens(again.request_id, 0, 0, "a", 1, finish=STOP))
    assert await read(generation) == "a"


async def test_closing_aborts_the_open_request_by_exact_id_and_only_once() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline, request(n=2))
    pipeline.tell(tokens(ID, 0, 0, "a", 1, finish=STOP))
    pipeline.tell(tokens(ID, 1, 0, "b", 2))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(2))[1]
    generation.close("disconnect")
    generation.close("disconnect")
    assert pipeline.aborted == [again.request_id]


async def test_closing_while_waiting_to_continue_submits_nothing_more() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.lose(ID, AWAY)
    generation.close("disconnect")
    await asyncio.sleep(0.02)
    assert len(pipeline.submitted) == 1


async def test_reader_that_falls_behind_is_cut_off() -> None:
    pipeline = FakePipeline()
    cuts: list[bool] = []
    generation = begin(pipeline, buffer_bytes=10_000)
    generation.on_overflow = lambda: cuts.append(True)
    for number in range(200):
        pipeline.tell(tokens(ID, 0, number, "x" * 100, number))
    assert cuts == [True]
    assert pipeline.aborted == [ID]
    with pytest.raises(RequestFailedError):
        await generation.next_updates()


async def test_usage_of_a_resumed_request_is_that_of_its_first_run() -> None:
    pipeline = FakePipeline()
    generation = begin(pipeline)
    pipeline.tell(Admission(ID, 7))
    pipeline.tell(Delta(ID, 0, 0, (1,), "a", prompt_usage=PromptUsage(7, 4)))
    pipeline.lose(ID, AWAY)
    again = (await pipeline.submissions(2))[1]
    pipeline.tell(Admission(again.request_id, 8))
    pipeline.tell(Delta(again.request_id, 0, 1, (2,), "b", prompt_usage=PromptUsage(8, 8), finish=STOP))
    await read(generation)
    assert (generation.usage.prompt_tokens, generation.usage.cached_tokens) == (7, 4)


def test_delays_grow_to_their_bound_and_end_at_the_deadline() -> None:
    policy = ResumePolicy(deadline_s=10, first_delay_s=0.1, max_delay_s=1)
    choice = ChoiceRecord(request(), 0, 0)
    choice.was_admitted = True
    choice.interrupted_at = 100.0
    delays = []
    for tries in range(6):
        choice.tries = tries
        delays.append(policy.delay(choice, AWAY, 100.0))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1, 1]
    assert policy.delay(choice, AWAY, 109.5) is None
    assert policy.delay(choice, DEFECT, 100.0) is None
