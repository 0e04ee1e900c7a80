"""Sequences of batches run only while no other sequence waits or runs, and lose nothing by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.scheduler.core.batch_class import WATCHFUL_PART, WATCHFUL_S
from services.scheduler.core.in_flight_prefixes import InFlightPrefixes
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from common.types import ScheduleRequest
    from services.scheduler.policy.policies import PolicyName

TOKENS = 20


def prompt_of(number: int) -> list[int]:
    return list(range(100 + 40 * number, 140 + 40 * number))


def line(name: str, number: int, user: str = "batcher", tenant: str = "acme") -> ScheduleRequest:
    request = make_request(name, prompt_of(number), user=user, tenant=tenant, max_tokens=TOKENS)
    return with_options(request, is_batch=True)


def running(harness: Harness) -> set[str]:
    return {sequence.request.request_id for sequence in harness.core.rows.occupants()}


def work(harness: Harness, passes: int) -> None:
    for _ in range(passes):
        harness.plan()
        harness.result()


def expected(number: int) -> list[int]:
    prompt = prompt_of(number)
    return expected_output(prompt, len(prompt) + TOKENS, (STOP_ID,))


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority", "lpm"])
def test_the_next_plan_after_an_interactive_request_has_no_row_of_a_batch(policy: PolicyName) -> None:
    harness = Harness(policy=policy, pages=128, max_rows=4)
    for number in range(4):
        harness.core.submit(line(f"line{number}", number), 0.0)
    work(harness, 8)
    assert len(running(harness)) == 4
    chat = make_request("chat", prompt_of(9), user="ann", priority=-5, max_tokens=TOKENS)
    harness.core.submit(chat, 0.0)
    harness.plan()
    assert running(harness) == {"chat"}
    while ("chat", 0) not in harness.finishes:
        assert running(harness) <= {"chat"}
        harness.plan()
        harness.result()
    harness.run()
    for number in range(4):
        assert harness.outputs[f"line{number}", 0] == expected(number)
    assert harness.outputs["chat", 0] == expected(9)
    assert harness.core.rows.batch_rows == 0
    harness.audit()


def test_waiting_lines_cost_the_plans_of_other_requests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_rows=2)
    chat = make_request("chat", prompt_of(9), max_tokens=TOKENS)
    harness.core.submit(chat, 0.0)
    harness.plan()
    for number in range(4):
        harness.core.submit(line(f"line{number}", number), 0.0)
    looks = 0

    def look(*_given: object) -> InFlightPrefixes:
        nonlocal looks
        looks += 1
        return InFlightPrefixes(*_given)  # type: ignore[arg-type]  # those of the planner

    monkeypatch.setattr("services.scheduler.core.planner.InFlightPrefixes", look)
    harness.result()
    work(harness, 4)
    assert running(harness) == {"chat"}
    assert looks == 0
    harness.run()
    assert len(harness.finishes) == 5
    assert looks > 0


def test_tenants_take_turns_in_the_batch_class() -> None:
    harness = Harness(policy="fair", pages=128, max_rows=1)
    for number in range(4):
        harness.core.submit(line(f"a{number}", number, tenant="a"), 0.0)
    harness.core.submit(line("b0", 5, tenant="b"), 0.0)
    finished: list[str] = []
    while len(finished) < 5:
        harness.plan()
        harness.result()
        finished += [name for name, _ in harness.finishes if name not in finished]
    assert finished.index("b0") <= 1


def test_a_waiting_batch_takes_no_place_from_interactive_requests() -> None:
    harness = Harness(max_waiting=4, max_rows=1)
    rejections = [harness.core.submit(line(f"line{number}", number), 0.0).rejected for number in range(8)]
    assert rejections[0] is None
    assert rejections[-1] is not None
    # The same tenant and user has its own places for other requests.
    chat = make_request("chat", prompt_of(4), user="batcher", tenant="acme")
    assert harness.core.submit(chat, 0.0).rejected is None


def test_a_batch_may_wait_for_any_time() -> None:
    harness = Harness()
    harness.core.submit(line("line", 0), 0.0)
    harness.core.submit(make_request("chat", prompt_of(1)), 0.0)
    harness.core.expire(1e9)
    assert ("line", 0) not in harness.finishes
    assert [sequence.request.request_id for sequence in harness.core.open_sequences] == ["line"]


def test_the_prefix_that_lines_share_is_computed_once() -> None:
    harness = Harness(pages=256, page_size=4, max_rows=8, max_step_tokens=32, cache="user_aware")
    shared, own, lines = list(range(100, 180)), 6, 24
    for number in range(lines):
        prompt = [*shared, *range(200 + own * number, 200 + own * (number + 1))]
        request = make_request(f"line{number}", prompt, user="batcher", max_tokens=4)
        harness.core.submit(with_options(request, is_batch=True), 0.0)
    harness.run()
    assert len(harness.finishes) == lines
    computed = sum(chunk.length for plan in harness.plans for chunk in plan.prefills)
    # 80 tokens are 20 whole pages.
    assert computed == len(shared) + own * lines
    assert [harness.cached[f"line{number}", 0] for number in range(lines)] == [0, *[len(shared)] * (lines - 1)]


def test_an_interactive_request_between_lines_costs_no_prefix_again() -> None:
    harness = Harness(pages=256, page_size=4, max_rows=4, max_step_tokens=32, cache="user_aware")
    shared = list(range(100, 180))
    for number in range(4):
        request = make_request(f"line{number}", [*shared, 200 + number], user="batcher", max_tokens=20)
        harness.core.submit(with_options(request, is_batch=True), 0.0)
    work(harness, 8)
    harness.core.submit(make_request("chat", prompt_of(9), user="ann", max_tokens=4), 0.0)
    before = sum(chunk.length for plan in harness.plans for chunk in plan.prefills)
    harness.run()
    assert len(harness.finishes) == 5
    after = sum(chunk.length for plan in harness.plans for chunk in plan.prefills)
    # The chat's prompt, and of each line at most the page that was not full and the last token.
    assert after - before <= len(prompt_of(9)) + 4 * (4 + 1)


def test_tenants_with_batches_of_different_sizes_get_equal_shares() -> None:
    harness = Harness(policy="fair", pages=512, max_rows=8, max_waiting=1000)
    for number in range(160):
        tenant, user = ("a", f"user{number % 3}") if number < 120 else ("b", "batcher")
        prompt = [100 + number, *range(10, 30)]
        request = make_request(f"{tenant}{number}", prompt, user=user, tenant=tenant, max_tokens=TOKENS)
        assert harness.core.submit(with_options(request, is_batch=True), 0.0).rejected is None

    def tokens_of(tenant: str) -> int:
        return sum(len(tokens) for (name, _), tokens in harness.outputs.items() if name.startswith(tenant))

    while sum(name.startswith("b") for name, _ in harness.finishes) < 30:
        harness.plan()
        assert harness.result()
    # Both have lines waiting; a line has TOKENS tokens, and 8 run at a time.
    assert abs(tokens_of("a") - tokens_of("b")) <= 8 * TOKENS
    assert harness.counters is not None
    assert harness.counters.waiting_tenants == 2
    assert harness.counters.gap <= 2 * 8 * TOKENS
    harness.run()
    assert len(harness.finishes) == 160


def test_batches_pause_after_an_interactive_request_and_then_run_in_short_steps() -> None:
    harness = Harness(pages=512, max_rows=4, max_step_tokens=64, batch_pause_s=0.5, target_plan_s=1.0)
    harness.core.submit(make_request("chat", prompt_of(9), user="ann", max_tokens=3), 0.0)
    for number in range(3):
        harness.core.submit(line(f"line{number}", number), 0.0)
    while ("chat", 0) not in harness.finishes:
        harness.plan()
        assert harness.result()
    while harness.result():
        pass
    ended = len(harness.plans)
    harness.now = 0.4
    harness.plan()
    assert not any(plan.opens or plan.prefills for plan in harness.plans[ended:])
    while harness.result():
        pass
    ended = len(harness.plans)
    for number in range(20):
        harness.now = 0.6 + number / 10
        harness.plan()
        assert harness.core.in_flight == 1
        harness.result()
    watchful = harness.plans[ended:]
    assert len(watchful) == 20
    assert {plan.steps for plan in watchful} == {1}
    assert max(chunk.length for plan in watchful for chunk in plan.prefills) <= 64 // WATCHFUL_PART
    harness.now += WATCHFUL_S
    harness.core.submit(line("later", 5), harness.now)
    harness.plan()
    assert harness.core.in_flight == 2
    assert any(chunk.length > 64 // WATCHFUL_PART for chunk in harness.plans[-2].prefills)
    harness.run()
    assert all(harness.outputs[f"line{number}", 0] == expected(number) for number in range(3))
