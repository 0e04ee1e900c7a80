"""Speculative decoding: several tokens of one pass, and always the same ones as without."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from common.deltas import TokenOrigin
from common.settings import SchedulerSettings, SpeculationSettings
from common.steps import EngineCapacity
from common.types import CacheMode, FinishReason
from services.scheduler.core.config import resolve_core
from services.scheduler.core.drafts import Guess, Origin, repetition
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import BOUND, STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from common.steps import StepPlan

PROMPT = [11, 22, 33, 44, 55]
LONG = 40
# Passes that take long enough for drafts to pay.
SLOW_US = 20_000


def harness_of(draft_tokens: int = 8, **options: object) -> Harness:
    fields: dict[str, object] = {
        "max_step_tokens": 64, "draft_tokens": draft_tokens, "compute_us": SLOW_US, **options
    }  # fmt: skip
    return Harness(**fields)  # type: ignore[arg-type]  # whatever a test wants to change


def expected(prompt: list[int], max_tokens: int = LONG, stops: tuple[int, ...] = (STOP_ID,)) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, stops)


def run(harness: Harness, *names: str, prompt: list[int] = PROMPT, user: str = "alice") -> list[StepPlan]:
    """Run requests with one prompt together; return the plans that it took."""
    before = len(harness.plans)
    for name in names:
        harness.core.submit(make_request(name, prompt, max_tokens=LONG, user=user), 0.0)
    harness.run()
    harness.audit()
    for name in names:
        assert harness.outputs[name, 0] == expected(prompt)
    return harness.plans[before:]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("target_plan_s", [0.0, 0.1])
def test_a_repeated_request_takes_fewer_passes_for_the_same_tokens(
    depth: int, page_size: int, target_plan_s: float
) -> None:
    harness = harness_of(depth=depth, page_size=page_size, pages=512 // page_size, target_plan_s=target_plan_s)
    first = run(harness, "r0")
    again = run(harness, "r1")
    assert sum(plan.steps for plan in again) < sum(plan.steps for plan in first) // 2
    assert harness.origins[TokenOrigin.DRAFTED] == harness.core.speculation.accepted_tokens > LONG // 2
    assert harness.origins.total() == sum(map(len, harness.outputs.values()))
    assert any(plan.drafts for plan in again)


def test_several_rows_have_drafts_of_their_own() -> None:
    harness = harness_of(pages=256)
    run(harness, "r0")
    assert max(len(plan.drafts) for plan in run(harness, "r1", "r2", "r3")) == 3


def test_rows_with_window_pages_have_drafts() -> None:
    harness = harness_of(pages=64, window=8, window_pool=48)
    run(harness, "r0")
    assert any(plan.drafts for plan in run(harness, "r1", "r2"))


def test_another_users_output_is_never_drafted() -> None:
    harness = harness_of(pages=256)
    run(harness, "r0", user="alice")
    plans = run(harness, "r1", user="bob")
    assert not any(plan.drafts for plan in plans)


def test_in_a_cache_that_all_share_it_is() -> None:
    harness = harness_of(pages=256, cache="shared")
    run(harness, "r0", user="alice")
    assert any(plan.drafts for plan in run(harness, "r1", user="bob"))


def test_a_request_that_may_not_read_the_cache_has_no_drafts_from_it() -> None:
    harness = harness_of(pages=256)
    run(harness, "r0")
    harness.core.submit(make_request("r1", PROMPT, max_tokens=LONG, cache_mode=CacheMode.NONE), 0.0)
    before = len(harness.plans)
    harness.run()
    assert not any(plan.drafts for plan in harness.plans[before:])
    assert harness.outputs["r1", 0] == expected(PROMPT)


@pytest.mark.parametrize("cache_mode", [CacheMode.DEFAULT, CacheMode.NONE])
def test_what_a_request_predicts_is_drafted_and_counted(cache_mode: CacheMode) -> None:
    answer = expected(PROMPT)
    # Something is left out, and something else is wrong.
    predicted = (*answer[:9], *answer[11:25], 5, 6, *answer[27:])
    harness = harness_of(pages=256)
    request = make_request("r0", PROMPT, max_tokens=LONG, cache_mode=cache_mode)
    harness.core.submit(replace(request, prediction_ids=predicted), 0.0)
    harness.run()
    assert harness.outputs["r0", 0] == answer
    assert sum(plan.steps for plan in harness.plans) < LONG // 2
    finish, speculation = harness.finishes["r0", 0], harness.core.speculation
    assert finish.accepted_prediction_tokens == speculation.accepted_tokens > LONG // 2
    assert finish.rejected_prediction_tokens == speculation.drafted_tokens - speculation.accepted_tokens > 0


def test_a_prediction_of_something_else_is_not_drafted_for_long() -> None:
    harness = harness_of(pages=256, prefill_tokens_per_s=4e6 / SLOW_US)
    request = make_request("r0", PROMPT, max_tokens=LONG)
    predicted = tuple(token for id_ in expected(PROMPT) for token in (id_, 5))
    harness.core.submit(replace(request, prediction_ids=predicted), 0.0)
    harness.run()
    assert harness.outputs["r0", 0] == expected(PROMPT)
    assert harness.core.speculation.drafted_tokens < 10


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_the_length_is_kept_within_an_accepted_draft(max_tokens: int) -> None:
    harness = harness_of(pages=256)
    run(harness, "r0")
    harness.core.submit(make_request("r1", PROMPT, max_tokens=max_tokens), 0.0)
    harness.run()
    assert harness.outputs["r1", 0] == expected(PROMPT, max_tokens)
    assert harness.finishes["r1", 0].reason is FinishReason.LENGTH


def test_a_stop_id_within_an_accepted_draft_ends_the_row() -> None:
    for stop in expected(PROMPT)[:20]:
        harness = harness_of(pages=256)
        run(harness, "r0")
        request = make_request("r1", PROMPT, max_tokens=LONG)
        stops = type(request.options.stop)(max_tokens=LONG, stop_token_ids=(stop,))
        harness.core.submit(with_options(request, stop=stops), 0.0)
        harness.run()
        assert harness.outputs["r1", 0] == expected(PROMPT, stops=(STOP_ID, stop))
        assert harness.finishes["r1", 0].matched_token_id == stop


def test_rows_with_grammars_draft_and_jump() -> None:
    harness = harness_of(3, pages=256, jump_tokens=8)
    run(harness, "r0")
    harness.core.submit(make_request("r1", PROMPT, max_tokens=LONG, grammar=BOUND), 0.0)
    harness.run()
    harness.audit()
    assert harness.outputs["r1", 0] == expected(PROMPT)
    assert harness.core.speculation.accepted_tokens > 5
    assert harness.core.jumped_tokens > 5


def test_a_plan_waits_for_the_results_of_drafts_before_it() -> None:
    harness = harness_of(pages=256, depth=3)
    run(harness, "r0")
    harness.core.submit(make_request("r1", PROMPT, max_tokens=LONG), 0.0)
    sent = []
    for _ in range(100):
        harness.plan()
        if harness.plans[-1].drafts:
            sent.append(harness.core.in_flight)
        if not harness.result():
            break
    assert len(sent) >= 3
    assert set(sent) == {1}


def test_lost_workers_lose_their_drafts_and_no_tokens() -> None:
    harness = harness_of(pages=256)
    run(harness, "r0")
    harness.core.submit(make_request("r1", PROMPT, max_tokens=LONG), 0.0)
    while not harness.plans[-1].drafts:
        harness.plan()
        harness.result()
    harness.lose_workers()
    harness.run()
    assert harness.outputs["r1", 0] == expected(PROMPT)


def test_passes_limited_by_computation_have_no_drafts() -> None:
    # A further token costs as much as the whole pass divided by its rows.
    harness = harness_of(pages=256, prefill_tokens_per_s=1e6 / SLOW_US)
    run(harness, "r0")
    assert not any(plan.drafts for plan in run(harness, "r1"))


def test_the_rows_of_a_large_batch_take_turns_to_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.speculation.SEARCHED_ROWS", 2)
    harness = harness_of(pages=1024, max_rows=16)
    run(harness, "first")
    names = [f"r{number}" for number in range(12)]
    plans = run(harness, *names)
    assert {int(draft.row) for plan in plans for draft in plan.drafts} == set(range(12))
    sizes = [len(plan.drafts) for plan in plans if plan.drafts]
    assert sizes[0] == 2
    assert max(sizes) > 6


def test_wrong_drafts_end_soon() -> None:
    # Every third token repeats, and what follows never does.
    rng = random.Random(1)
    prompt = [part for _ in range(40) for part in (500, 501, rng.randrange(10, 400))] + [500, 501]
    harness = harness_of(pages=512, max_context=512, max_step_tokens=256, prefill_tokens_per_s=4e6 / SLOW_US)
    harness.core.submit(make_request("r0", prompt, max_tokens=200), 0.0)
    harness.run()
    assert harness.outputs["r0", 0] == expected(prompt, 200)
    assert harness.core.speculation.drafted_tokens < 20


@pytest.mark.parametrize(
    ("method", "device", "verifies", "most"),
    [
        ("ngram", "cpu", True, 16),
        ("ngram", "cuda:0", True, 16),
        ("ngram", "cpu", False, 0),
        ("off", "cpu", True, 0),
    ],
)
def test_drafts_are_made_where_they_are_asked_for_and_can_be_verified(
    method: Literal["off", "ngram"], device: str, verifies: bool, most: int
) -> None:
    capacity = EngineCapacity(64, 16, 512, 1000, (2,), 1, "tiny", device, 1, verifies_drafts=verifies)
    settings = SchedulerSettings(speculation=SpeculationSettings(method=method))
    assert resolve_core(settings, capacity).draft_tokens == most


@pytest.mark.parametrize(
    ("known", "most", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], 2, Guess(np.array([3, 4]), Origin.SHORT_MATCH)),
        # The latest of equally long ones.
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, Guess(np.array([4]), Origin.SHORT_MATCH)),
        # A longer one before a later one.
        ([9, 9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], 1, Guess(np.array([3]), Origin.SHORT_MATCH)),
        # A text that repeats itself goes on so.
        ([5, 6, 5, 6], 5, Guess(np.array([5, 6, 5, 6, 5]), Origin.SHORT_MATCH)),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 1, Guess(np.array([5]), Origin.MEDIUM_MATCH)),
        ([*range(9), *range(8)], 1, Guess(np.array([8]), Origin.LONG_MATCH)),
        ([1, 2, 3], 4, None),
        ([2, 1, 3, 1], 4, None),
        ([1], 4, None),
    ],
)
def test_repetitions_are_found(known: list[int], most: int, guess: Guess | None) -> None:
    found = repetition(np.array(known, np.int32), most)
    assert (found is None) == (guess is None)
    if found is not None and guess is not None:
        assert found.token_ids.tolist() == guess.token_ids.tolist()
        assert found.origin is guess.origin
