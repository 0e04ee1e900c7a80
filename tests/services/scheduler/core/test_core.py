from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.grammars import Grammar, GrammarKind
from common.types import CacheMode, ErrorCode, FinishReason, RequestId, Resume, StopConditions
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(17 * position + salt) % 900 + 10 for position in range(length)]


def outcome(prompt: list[int], max_tokens: int) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


@pytest.mark.parametrize("cache", ["isolated", "shared", "chunk"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_request_gets_its_tokens_and_one_finish(cache: CacheName, depth: int) -> None:
    harness = Harness(cache=cache, depth=depth)
    prompts = {f"r{index}": prompt_of(5 + 7 * index, index) for index in range(8)}
    for name, prompt in prompts.items():
        assert harness.core.submit(make_request(name, prompt), 0.0).rejected is None
    harness.run()
    harness.audit()
    for name, prompt in prompts.items():
        assert harness.outputs[name, 0] == outcome(prompt, 8)
        assert harness.finishes[name, 0].reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert harness.core.rows.running == 0
    assert not list(harness.core.open_sequences)


def test_the_token_that_ended_a_choice_is_reported_also_if_it_is_the_model_s_own() -> None:
    harness = Harness()
    prompt = next(one for salt in range(2000) if outcome(one := prompt_of(6, salt), 8)[-1] == STOP_ID)
    harness.core.submit(make_request("r0", prompt), 0.0)
    harness.run()
    finish = harness.finishes["r0", 0]
    assert (finish.reason, finish.matched_token_id) == (FinishReason.STOP, STOP_ID)


def test_a_long_prompt_is_prefilled_in_chunks_while_other_rows_decode() -> None:
    harness = Harness(max_step_tokens=8)
    harness.core.submit(make_request("short", prompt_of(4), max_tokens=20), 0.0)
    harness.plan()
    harness.core.submit(make_request("long", prompt_of(60, 5)), 0.0)
    harness.run()
    chunks = [chunk for plan in harness.plans for chunk in plan.prefills if chunk.length and chunk.row == 1]
    assert len(chunks) >= 60 // 8
    assert all(sum(chunk.length for chunk in plan.prefills) <= 8 for plan in harness.plans)
    assert harness.outputs["long", 0] == outcome(prompt_of(60, 5), 8)
    assert harness.outputs["short", 0] == outcome(prompt_of(4), 20)


def test_rows_are_retracted_when_memory_runs_out_and_generate_the_same_tokens() -> None:
    harness = Harness(pages=16, max_rows=4)
    prompts = {f"r{index}": prompt_of(8, index) for index in range(4)}
    for name, prompt in prompts.items():
        harness.core.submit(make_request(name, prompt, max_tokens=40), 0.0)
    harness.run()
    assert harness.core.memory.retractions > 0
    for name, prompt in prompts.items():
        assert harness.outputs[name, 0] == outcome(prompt, 40)


def test_the_lowest_priority_is_retracted_first() -> None:
    harness = Harness(pages=12, max_rows=2)
    harness.core.submit(make_request("low", prompt_of(8, 1), max_tokens=30, priority=0), 0.0)
    harness.core.submit(make_request("high", prompt_of(8, 2), max_tokens=30, priority=5), 0.0)
    while not harness.core.memory.retractions:
        harness.plan()
        harness.result()
    assert [sequence.request.request_id for sequence in harness.core.queue] == ["low"]
    harness.run()
    assert harness.outputs["low", 0] == outcome(prompt_of(8, 1), 30)


def test_admission_does_not_reserve_max_tokens() -> None:
    harness = Harness(pages=16, max_rows=4)
    for index in range(4):
        harness.core.submit(make_request(f"r{index}", prompt_of(4, index), max_tokens=50), 0.0)
    harness.plan()
    assert harness.core.rows.running == 4


def test_a_prefix_is_reused_by_its_owner_only() -> None:
    harness = Harness()
    harness.core.submit(make_request("first", prompt_of(21)), 0.0)
    harness.run()
    harness.core.submit(make_request("again", prompt_of(21)), 0.0)
    harness.core.submit(make_request("other", prompt_of(21), user="bob"), 0.0)
    harness.run()
    assert harness.cached == {("first", 0): 0, ("again", 0): 20, ("other", 0): 0}


def test_the_second_turn_finds_the_first_answer() -> None:
    harness = Harness()
    harness.core.submit(make_request("one", prompt_of(10), max_tokens=9), 0.0)
    harness.run()
    conversation = prompt_of(10) + harness.outputs["one", 0]
    harness.core.submit(make_request("two", [*conversation, 11, 12, 13]), 0.0)
    harness.run()
    # All but the last sampled token has KV, in whole pages of 4.
    assert harness.cached["two", 0] == (len(conversation) - 1) // 4 * 4


def test_cache_mode_none_neither_reads_nor_inserts() -> None:
    harness = Harness()
    harness.core.submit(make_request("hidden", prompt_of(21), cache_mode=CacheMode.NONE), 0.0)
    harness.run()
    harness.core.submit(make_request("visible", prompt_of(21)), 0.0)
    harness.run()
    harness.core.submit(make_request("hidden again", prompt_of(21), cache_mode=CacheMode.NONE), 0.0)
    harness.run()
    assert harness.cached == {("hidden", 0): 0, ("visible", 0): 0, ("hidden again", 0): 0}


def test_choices_share_one_prefill() -> None:
    harness = Harness(max_rows=4)
    harness.core.submit(make_request("n", prompt_of(25), n=3), 0.0)
    harness.run()
    assert [harness.cached["n", index] for index in range(3)] == [0, 24, 24]
    assert all(harness.outputs["n", index] == outcome(prompt_of(25), 8) for index in range(3))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 6])
def test_an_abort_at_any_time_gives_back_row_and_pages(turns: int) -> None:
    harness = Harness(max_step_tokens=8)
    harness.core.submit(make_request("kept", prompt_of(9, 3), max_tokens=12), 0.0)
    harness.core.submit(make_request("gone", prompt_of(30), max_tokens=30), 0.0)
    for _ in range(turns):
        harness.plan()
        harness.result()
    assert harness.core.abort(RequestId("gone"))
    assert not harness.core.abort(RequestId("gone"))
    harness.check_accounts()
    harness.audit()
    harness.run()
    assert harness.finishes["gone", 0].reason is FinishReason.ABORT
    assert harness.outputs["kept", 0] == outcome(prompt_of(9, 3), 12)
    accounts = harness.core.memory.account(harness.core.rows)
    assert accounts.free + accounts.evictable == accounts.capacity


def test_an_unknown_id_or_a_prefix_of_an_id_aborts_nothing() -> None:
    harness = Harness()
    harness.core.submit(make_request("request-1", prompt_of(5)), 0.0)
    assert not harness.core.abort(RequestId("request-"))
    harness.run()
    assert harness.finishes["request-1", 0].reason is not FinishReason.ABORT


def test_rows_continue_with_the_same_tokens_after_the_workers_are_lost() -> None:
    harness = Harness()
    prompts = {f"r{index}": prompt_of(9, index) for index in range(6)}
    for name, prompt in prompts.items():
        harness.core.submit(make_request(name, prompt, max_tokens=20), 0.0)
    for _ in range(7):
        harness.plan()
        harness.result()
    harness.lose_workers()
    harness.run()
    harness.audit()
    for name, prompt in prompts.items():
        assert harness.outputs[name, 0] == outcome(prompt, 20)


def test_a_resumed_request_continues_where_the_client_was() -> None:
    harness = Harness()
    whole = outcome(prompt_of(9), 20)
    resume = Resume(tuple(whole[:6]), delivered_characters=0)
    harness.core.submit(make_request("resumed", prompt_of(9), max_tokens=20, resume=resume), 0.0)
    harness.run()
    assert harness.outputs["resumed", 0] == whole


def test_a_resumed_request_with_nothing_left_finishes_at_once() -> None:
    harness = Harness()
    resume = Resume((1, 2, 3), delivered_characters=0)
    harness.core.submit(make_request("done", prompt_of(9), max_tokens=3, resume=resume), 0.0)
    harness.run()
    assert harness.finishes["done", 0].reason is FinishReason.LENGTH
    assert harness.outputs["done", 0] == [1, 2, 3]


def test_a_choice_ended_by_the_detokenizer_leaves_without_a_second_finish() -> None:
    harness = Harness()
    harness.core.submit(make_request("stopped", prompt_of(5), max_tokens=50), 0.0)
    for _ in range(4):
        harness.plan()
        harness.result()
    harness.core.end_silently(1)
    harness.core.end_silently(1)
    harness.run()
    assert ("stopped", 0) not in harness.finishes
    assert harness.core.rows.running == 0


def test_leases_grow_while_nothing_waits_and_end_when_something_does() -> None:
    harness = Harness(target_plan_s=0.005, max_rows=2)
    harness.core.submit(make_request("long", prompt_of(5), max_tokens=60), 0.0)
    for _ in range(30):
        harness.plan()
        harness.result()
    assert max(plan.steps for plan in harness.plans) == 5
    seen = len(harness.plans)
    harness.core.submit(make_request("next", prompt_of(5, 1)), 0.0)
    while not harness.core.rows.sequences[1]:
        harness.plan()
        harness.result()
    assert harness.plans[-1].steps == 1
    assert len(harness.plans) > seen
    harness.run()
    assert harness.outputs["long", 0] == outcome(prompt_of(5), 60)


def test_waiting_and_running_limits_end_requests_with_a_timeout() -> None:
    harness = Harness(max_rows=1)
    harness.core.submit(make_request("running", prompt_of(5), max_tokens=100), 0.0)
    harness.core.submit(make_request("waiting", prompt_of(5)), 0.0)
    harness.core.submit(make_request("impatient", prompt_of(5), timeout_ms=500), 0.0)
    harness.plan()
    harness.core.expire(1.0)
    harness.collect()
    assert set(harness.finishes) == {("impatient", 0)}
    harness.core.expire(11.0)
    harness.collect()
    assert set(harness.finishes) == {("impatient", 0), ("waiting", 0)}
    harness.core.expire(101.0)
    harness.collect()
    errors = [finish.error for finish in harness.finishes.values()]
    assert all(error is not None and error.code is ErrorCode.TIMEOUT and error.retryable for error in errors)
    assert len(errors) == 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": [5000]}, ErrorCode.INVALID_REQUEST),
        ({"prompt": [-1]}, ErrorCode.INVALID_REQUEST),
        ({"prompt": prompt_of(128)}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"n": 2, "resume": Resume((1,), 0)}, ErrorCode.INVALID_REQUEST),
        ({"n": 101}, ErrorCode.QUEUE_FULL),
        ({"request_id": "taken"}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_requests_that_cannot_run_are_refused_with_their_cause(change: dict[str, object], code: ErrorCode) -> None:
    harness = Harness()
    harness.core.submit(make_request("taken", prompt_of(4)), 0.0)
    arguments: dict[str, object] = {"request_id": "new", "prompt": prompt_of(4), **change}
    admission = harness.core.submit(make_request(**arguments), 0.0)  # type: ignore[arg-type]  # a table of cases
    assert admission.rejected is not None
    assert admission.rejected.code is code
    harness.run()
    assert set(harness.finishes) == {("taken", 0)}


def test_a_full_queue_says_when_to_come_back() -> None:
    harness = Harness(max_waiting=1)
    harness.core.submit(make_request("first", prompt_of(4)), 0.0)
    rejected = harness.core.submit(make_request("second", prompt_of(4)), 0.0).rejected
    assert rejected is not None
    assert rejected.retryable
    assert rejected.retry_after_ms


def test_pause_admits_no_sequence_and_lets_running_rows_finish() -> None:
    harness = Harness()
    harness.core.submit(make_request("running", prompt_of(4)), 0.0)
    harness.plan()
    harness.core.pause(paused=True)
    harness.core.submit(make_request("waiting", prompt_of(4, 1)), 0.0)
    harness.run()
    assert set(harness.finishes) == {("running", 0)}
    harness.core.pause(paused=False)
    harness.run()
    assert set(harness.finishes) == {("running", 0), ("waiting", 0)}


def test_a_sequence_longer_than_memory_ends_with_length() -> None:
    harness = Harness(pages=4, max_rows=1)
    harness.core.submit(make_request("endless", prompt_of(4), max_tokens=None), 0.0)
    harness.run()
    assert len(harness.outputs["endless", 0]) <= 12
    assert harness.finishes["endless", 0].reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_an_ignored_eos_is_postponed_with_a_grammar_and_omitted_otherwise() -> None:
    harness = Harness()
    stop = StopConditions(max_tokens=8, min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    free = with_options(make_request("free", [1, 2]), stop=stop)
    grammar = Grammar(GrammarKind.REGEX, "a+", "regex")
    for request in (
        free,
        with_options(
            replace(free, request_id=RequestId("bound")), sampling=replace(free.options.sampling, grammar=grammar)
        ),
        with_options(replace(free, request_id=RequestId("ends")), stop=replace(stop, ignore_eos=False)),
    ):
        harness.core.submit(request, harness.now)
    harness.run()
    opens = {opened.request_id: opened for plan in harness.plans for opened in plan.opens}
    ends = {name: (opened.stop_token_ids, opened.postponed_token_ids) for name, opened in opens.items()}
    assert ends == {"free": ((9,), ()), "bound": ((9, STOP_ID), (STOP_ID,)), "ends": ((9, STOP_ID), ())}
    assert {opened.min_new_tokens for opened in opens.values()} == {3}
