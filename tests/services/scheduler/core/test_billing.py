from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from common.limits import Limits, SubjectLimits, TenantLimits
from common.steps import StepResult
from common.types import CacheMode, StepId, Subject
from services.scheduler.core.rows import RowSlots
from services.scheduler.core.shares import Billing, ShareConfig, VirtualCounters
from tests.services.scheduler.core.harness import Harness, make_request

PROMPT = [(7 * position) % 800 + 10 for position in range(24)]


def charged(harness: Harness, user: str) -> float:
    assert harness.counters is not None
    return harness.counters.of_subject(Subject("tenant", user))


def make(**options: Any) -> Harness:
    harness = Harness(policy="fair", **options)
    # Somebody who waits all the time keeps the floor at 0, so that counters are absolute.
    assert harness.counters is not None
    harness.counters.enter(make_request("floor", PROMPT, user="floor").view.subject)
    return harness


def output_of(harness: Harness, name: str, index: int = 0) -> int:
    return len(harness.outputs[name, index])


def test_a_request_is_charged_for_its_prompt_and_twice_for_its_output() -> None:
    harness = make()
    harness.core.submit(make_request("one", PROMPT, max_tokens=5), 0.0)
    harness.run()
    # The last token's pass is over when the row ends.
    assert charged(harness, "alice") == 24 + 2 * output_of(harness, "one")


def test_tokens_cached_in_its_own_view_are_not_charged_to_a_subject() -> None:
    harness = make()
    harness.core.submit(make_request("first", PROMPT, max_tokens=4), 0.0)
    harness.run()
    before = charged(harness, "alice")
    harness.core.submit(make_request("again", PROMPT, max_tokens=4), 0.0)
    harness.core.submit(make_request("other", PROMPT, user="bob", max_tokens=4), 0.0)
    harness.run()
    assert harness.cached["again", 0] == 20
    assert charged(harness, "alice") - before == 4 + 2 * output_of(harness, "again")
    assert charged(harness, "bob") == 24 + 2 * output_of(harness, "other")


def test_several_choices_pay_for_the_prompt_once() -> None:
    harness = make()
    harness.core.submit(make_request("three", PROMPT, max_tokens=4, n=3), 0.0)
    harness.run()
    outputs = sum(output_of(harness, "three", index) for index in range(3))
    assert charged(harness, "alice") == 24 + 2 * 4 + 2 * outputs


def test_a_retraction_is_not_charged_again() -> None:
    harness = make(pages=14)
    for name, user in (("one", "alice"), ("two", "bob")):
        prompt = [token + 100 * (user == "bob") for token in PROMPT]
        harness.core.submit(make_request(name, prompt, user=user, max_tokens=20), 0.0)
    harness.run()
    assert harness.core.memory.retractions > 0
    for name, user in (("one", "alice"), ("two", "bob")):
        assert charged(harness, user) == 24 + 2 * output_of(harness, name)


def test_a_request_that_never_started_costs_nothing() -> None:
    harness = make()
    harness.core.pause(paused=True)
    harness.core.submit(make_request("one", PROMPT), 0.0)
    harness.plan()
    harness.core.abort(make_request("one", PROMPT).request_id)
    harness.run()
    assert charged(harness, "alice") == 0


def test_an_abort_in_the_middle_of_the_prompt_gives_the_rest_back() -> None:
    harness = make(max_step_tokens=8, depth=1)
    harness.core.submit(make_request("one", PROMPT), 0.0)
    harness.plan()
    assert charged(harness, "alice") == 24
    harness.core.abort(make_request("one", PROMPT).request_id)
    harness.run()
    assert charged(harness, "alice") == 8


def test_lost_workers_are_not_the_users_fault() -> None:
    harness = make()
    harness.core.submit(make_request("one", PROMPT, max_tokens=6), 0.0)
    for _ in range(4):
        harness.plan()
        harness.result()
    harness.lose_workers()
    harness.run()
    assert charged(harness, "alice") == 24 + 2 * output_of(harness, "one")


@pytest.mark.parametrize("passes", [0, 3])
def test_idle_rows_are_not_charged_for_passes_that_were_lost_with_the_workers(passes: int) -> None:
    harness = make(pages=24, max_rows=2, max_step_tokens=128, target_plan_s=1.0)
    harness.core.submit(make_request("one", PROMPT, max_tokens=60), 0.0)
    for _ in range(4):
        harness.plan()
        harness.result()
    harness.plan()
    while harness.core.in_flight > 1:
        assert harness.result()
    # The pages that are free are kept for the first, and the second could run in them.
    harness.core.submit(make_request("large", [500, *range(70)], user="large"), 0.0)
    harness.core.submit(make_request("small", [501, *PROMPT[:3]], user="small", max_tokens=4), 0.0)
    harness.plan()
    steps = harness.plans[-1].steps
    assert steps > passes
    assert charged(harness, "large") == 2 * steps
    while harness.core.in_flight > 1:
        assert harness.result()
    for _ in range(passes):
        assert harness.result()
    harness.lose_workers()
    assert charged(harness, "large") == 2 * passes


@pytest.mark.parametrize("is_batch", [False, True])
def test_idle_rows_are_not_charged_for_passes_after_all_rows_have_stopped(*, is_batch: bool) -> None:
    interactive, batches = VirtualCounters(ShareConfig()), VirtualCounters(ShareConfig())
    billing, subject = Billing(RowSlots(4, 64, 4), interactive, batches), Subject("tenant", "large")
    refused = MagicMock(is_batch=is_batch)
    refused.request.view.subject = subject
    for counters in (interactive, batches):
        counters.enter(subject)
    billing.charge_idle_rows(refused, StepId(5), 3, 8)
    for substep in range(2):
        billing.note_pass(StepResult(StepId(5), substep, last=substep == 1))
    served = [0, 2 * 3 * 2] if is_batch else [2 * 3 * 2, 0]
    assert [counters.of_subject(subject) for counters in (interactive, batches)] == served
    # There is nothing left to be refunded.
    billing.lose_plans()
    assert [counters.of_subject(subject) for counters in (interactive, batches)] == served


def weigh(counters: VirtualCounters, *, tenant: float, subject: float) -> None:
    counters.adopt(Limits(default=TenantLimits(weight=tenant, each_subject=SubjectLimits(weight=subject))))


def test_idle_rows_are_refunded_with_the_weights_of_their_charge() -> None:
    counters = VirtualCounters(ShareConfig())
    billing, subject = Billing(RowSlots(4, 64, 4), counters, None), Subject("tenant", "large")
    refused = MagicMock(is_batch=False)
    refused.request.view.subject = subject
    counters.enter(subject)
    weigh(counters, tenant=4.0, subject=2.0)
    billing.charge_idle_rows(refused, StepId(5), 3, 8)
    weigh(counters, tenant=0.25, subject=0.125)
    billing.note_pass(StepResult(StepId(5), 0, last=False))
    billing.note_pass(StepResult(StepId(5), 1, last=True))
    assert (counters.of_tenant("tenant"), counters.of_subject(subject)) == (2 * 3 * 2 / 4, 2 * 3 * 2 / 2)
    # The next charge has the new ones.
    billing.charge_idle_rows(refused, StepId(6), 1, 1)
    assert (counters.of_tenant("tenant"), counters.of_subject(subject)) == (3 + 2 / 0.25, 6 + 2 / 0.125)
    weigh(counters, tenant=100.0, subject=100.0)
    billing.lose_plans()
    assert (counters.of_tenant("tenant"), counters.of_subject(subject)) == (3, 6)


def test_a_prompt_that_ends_in_the_middle_is_refunded_with_the_weights_of_its_charge() -> None:
    harness = make(max_step_tokens=8, depth=1)
    counters = harness.counters
    assert counters is not None
    weigh(counters, tenant=4.0, subject=2.0)
    harness.core.submit(make_request("one", PROMPT), 0.0)
    harness.plan()
    assert charged(harness, "alice") == 24 / 2
    weigh(counters, tenant=0.25, subject=0.125)
    harness.core.abort(make_request("one", PROMPT).request_id)
    harness.run()
    assert (counters.of_tenant("tenant"), charged(harness, "alice")) == (8 / 4, 8 / 2)


def test_without_the_cache_the_whole_prompt_is_charged() -> None:
    harness = make()
    for name in ("one", "two"):
        harness.core.submit(make_request(name, PROMPT, max_tokens=2, cache_mode=CacheMode.NONE), 0.0)
        harness.run()
    assert charged(harness, "alice") == 2 * 24 + 2 * (output_of(harness, "one") + output_of(harness, "two"))


def test_many_requests_of_one_user_do_not_delay_another() -> None:
    harness = Harness(policy="fair", max_rows=1, max_step_tokens=16)
    for number in range(6):
        prompt = [token + number for token in PROMPT]
        harness.core.submit(make_request(f"greedy {number}", prompt, user="greedy", max_tokens=4), 0.0)
    harness.core.submit(make_request("modest", PROMPT, user="modest", max_tokens=4), 0.0)
    harness.run()
    order = [name for name, _ in harness.finishes]
    assert order.index("modest") <= 1
