"""Rows that jump forward: as many tokens at once as their grammar forces, and always the same ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.deltas import TokenOrigin
from common.types import FinishReason, RequestId, SessionTurn, SessionWish, Subject, View
from services.scheduler.core.session import SessionRules
from tests.fakes.simulated_worker import expected_output, is_forced, next_token
from tests.services.scheduler.core.harness import BOUND, STOP_ID, Harness, make_request, with_options

PROMPT = [11, 22, 33, 44, 55]
LONG = 40


def harness_of(jump_tokens: int = 8, **options: object) -> Harness:
    fields: dict[str, object] = {"max_step_tokens": 64, "depth": 1, "jump_tokens": jump_tokens, **options}
    return Harness(**fields)  # type: ignore[arg-type]  # whatever a test wants to change


def run(harness: Harness, *prompts: list[int], max_tokens: int = LONG) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        harness.core.submit(make_request(f"r{index}", prompt, max_tokens=max_tokens, grammar=BOUND), 0.0)
    harness.run()
    harness.check_accounts()
    harness.audit()
    return [harness.outputs[f"r{index}", 0] for index in range(len(prompts))]


def passes(harness: Harness) -> int:
    return sum(plan.steps for plan in harness.plans)


def expected(prompt: list[int], max_tokens: int = LONG) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("target_plan_s", [0.0, 0.004])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_jump_forward_gives_the_same_output_in_fewer_passes(depth: int, target_plan_s: float, page_size: int) -> None:
    harness = harness_of(depth=depth, target_plan_s=target_plan_s, page_size=page_size, pages=256 // page_size)
    without = harness_of(0, depth=depth, target_plan_s=target_plan_s, page_size=page_size, pages=256 // page_size)
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    assert run(harness, *prompts) == run(without, *prompts) == [expected(prompt) for prompt in prompts]
    assert harness.core.jumped_tokens > 20
    assert without.core.jumped_tokens == 0
    assert passes(harness) < passes(without)


def test_every_forced_token_saves_a_pass_while_there_is_room() -> None:
    harness = harness_of(64, max_step_tokens=512, pages=256)
    [output] = run(harness, PROMPT)
    # The first of a run of forced tokens is sampled where nothing was sampled before it.
    known = [*PROMPT, *output]
    forced = sum(is_forced(next_token(known[:length])) for length in range(len(PROMPT) + 1, len(known)))
    assert harness.core.jumped_tokens == forced
    assert harness.origins == {TokenOrigin.FORCED: forced, TokenOrigin.SAMPLED: len(output) - forced}
    assert forced > 10
    # The last plan only closes the row.
    assert len(harness.plans) - 1 == len(output) - forced


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_the_length_is_kept_to_within_a_jump(max_tokens: int) -> None:
    harness = harness_of()
    assert run(harness, PROMPT, max_tokens=max_tokens) == [expected(PROMPT, max_tokens)]
    assert harness.finishes["r0", 0].reason is FinishReason.LENGTH


def test_a_stop_id_that_is_forced_ends_the_row() -> None:
    stops = {token for token in expected(PROMPT) if is_forced(token)}
    assert stops
    for stop in sorted(stops):
        harness = harness_of()
        request = make_request("r0", PROMPT, max_tokens=LONG, grammar=BOUND)
        harness.core.submit(with_options(request, stop=replace(request.options.stop, stop_token_ids=(stop,))), 0.0)
        harness.run()
        assert harness.outputs["r0", 0] == expected_output(PROMPT, 45, (STOP_ID, stop))
        assert harness.finishes["r0", 0].matched_token_id == stop


def test_with_little_memory_rows_jump_less_and_none_is_retracted() -> None:
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    pages = sum(-(-(len(prompt) + 12) // 4) for prompt in prompts)
    harness = harness_of(16, pages=pages, max_step_tokens=128)
    assert run(harness, *prompts, max_tokens=12) == [expected(prompt, 12) for prompt in prompts]
    assert harness.core.memory.retractions == 0


def test_a_retraction_within_a_jump_changes_nothing() -> None:
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    harness = harness_of(16, pages=22, max_step_tokens=128, depth=2)
    assert run(harness, *prompts) == [expected(prompt) for prompt in prompts]
    assert harness.core.memory.retractions > 0
    assert harness.core.jumped_tokens > 0


def test_a_row_aborted_during_a_jump_leaves_no_tokens_or_pages() -> None:
    harness = harness_of(depth=2)
    harness.core.submit(make_request("r0", PROMPT, max_tokens=LONG, grammar=BOUND), 0.0)
    for _ in range(4):
        harness.plan()
        harness.result()
    assert harness.core.abort(RequestId("r0"))
    told = list(harness.outputs["r0", 0])
    harness.core.submit(make_request("r1", PROMPT[1:], max_tokens=LONG), 0.0)
    harness.run()
    assert harness.outputs["r0", 0] == told
    assert harness.outputs["r1", 0] == expected(PROMPT[1:])
    harness.check_accounts()
    harness.audit()


def test_a_row_recovers_when_workers_are_lost_within_a_jump() -> None:
    harness = harness_of(depth=2)
    harness.core.submit(make_request("r0", PROMPT, max_tokens=LONG, grammar=BOUND), 0.0)
    while not harness.core.jumped_tokens:
        harness.plan()
        harness.result()
    harness.lose_workers()
    harness.run()
    assert harness.outputs["r0", 0] == expected(PROMPT)


def test_a_pass_never_exceeds_its_budget() -> None:
    """The simulated worker counts what each pass computes."""
    prompts = [[*PROMPT, salt] * 4 for salt in range(12)]
    harness = harness_of(16, max_step_tokens=20, max_rows=4, pages=256, depth=2)
    assert run(harness, *prompts) == [expected(prompt) for prompt in prompts]
    assert harness.core.jumped_tokens > 0


def test_forced_tokens_count_towards_the_step_size_with_following_prompts() -> None:
    harness = harness_of(2, max_step_tokens=12, pages=14)
    long = [(13 * i) % 900 + 10 for i in range(20)]
    harness.core.submit(make_request("r0", [10, 23], max_tokens=4, grammar=BOUND), 0.0)
    harness.core.submit(make_request("r1", long, max_tokens=1), 0.0)
    harness.run()
    assert harness.core.jumped_tokens == 2
    assert harness.outputs["r0", 0] == expected([10, 23], 4)
    assert harness.outputs["r1", 0] == expected(long, 1)


def test_nothing_jumps_if_steps_have_room_for_one_token_per_row_only() -> None:
    harness = harness_of(16, max_step_tokens=16, max_rows=16)
    assert run(harness, PROMPT) == [expected(PROMPT)]
    assert harness.core.jumped_tokens == 0


def test_only_rows_whose_grammar_alone_decides_may_jump() -> None:
    harness = harness_of()
    harness.core.submit(make_request("free", PROMPT, max_tokens=LONG), 0.0)
    request = make_request("told", PROMPT[1:], max_tokens=LONG, grammar=BOUND)
    harness.core.submit(with_options(request, sampling=replace(request.options.sampling, top_logprobs=0)), 0.0)
    harness.run()
    assert not any(plan.jumps for plan in harness.plans)
    assert harness.core.jumped_tokens == 0


@pytest.mark.parametrize("max_tokens", range(2, 12))
def test_a_session_continues_after_tokens_forced_at_the_end(max_tokens: int) -> None:
    harness = harness_of(
        16, sessions=SessionRules(per_subject=1, total=1, subject_tokens=96, tenant_tokens=96, total_tokens=96)
    )
    alice = View(Subject("tenant", "alice"))
    harness.core.sessions.open(SessionWish(alice, "chat"))
    ended: list[list[int]] = []
    for name, after, prompt in (("one", None, PROMPT), ("two", "one", [5, 6])):
        request = make_request(name, prompt, max_tokens=max_tokens, grammar=BOUND)
        turn = SessionTurn(name, after=after)
        assert harness.core.submit(with_options(request, session="chat", turn=turn), 0.0).rejected is None
        harness.run()
        whole = [*(ended[-1] if ended else []), *prompt]
        ended.append([*whole, *expected(whole, max_tokens)])
        assert [*whole, *harness.outputs[name, 0]] == ended[-1]
    harness.check_accounts()
    harness.audit()
