"""Passes of batches are abandoned for interactive sequences, and no token is lost or computed wrong by that."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from common.steps import StepPlan
    from common.types import ScheduleRequest

TOKENS = 12
PLANS_IN_FLIGHT = 2


class AbandoningHarness(Harness):
    """Runs plans one by one when results are asked for, and abandons those that a later plan has overtaken."""

    def __init__(self, **given: Any) -> None:
        super().__init__(pages=160, max_rows=4, abandons_passes=True, **given)
        self._waiting: deque[StepPlan] = deque()
        self.abandoned = 0
        # Whether the oldest plan has been under way since before it was overtaken.
        self._is_under_way = False

    def plan(self) -> None:
        while self.core.in_flight < self.depth or self.core.overtakes:
            plan = self.core.plan(self.now, epoch=0)
            if plan is None:
                break
            self.plans.append(plan)
            self._waiting.append(plan)
        self.collect()

    def begin_pass(self) -> None:
        """Let the oldest plan be under way before others come."""
        self._is_under_way = bool(self._waiting)

    def result(self) -> bool:
        if not self.results and self._waiting:
            plan = self._waiting.popleft()
            if plan.can_abandon and not all(later.can_abandon for later in self._waiting):
                self.abandoned += 1
                self.results.append(self.worker.abandon(plan, under_way=self._is_under_way))
            else:
                self.results.extend(self.worker.run(plan))
            self._is_under_way = False
        return super().result()


def prompt_of(number: int, length: int = 24) -> list[int]:
    return [100 + number, *range(length - 1)]


def request_of(number: int, *, is_batch: bool) -> ScheduleRequest:
    name = f"{'line' if is_batch else 'chat'}{number}"
    request = make_request(name, prompt_of(number), user="batcher" if is_batch else "ann", max_tokens=TOKENS)
    return with_options(request, is_batch=is_batch)


def expected(number: int) -> list[int]:
    prompt = prompt_of(number)
    return expected_output(prompt, len(prompt) + TOKENS, (STOP_ID,))


def test_a_request_is_planned_at_once_although_plans_of_a_batch_fill_the_pipeline() -> None:
    harness = AbandoningHarness(max_step_tokens=64)
    for number in range(4):
        harness.core.submit(request_of(number, is_batch=True), 0.0)
    for _ in range(6):
        harness.plan()
        harness.result()
    harness.plan()
    assert harness.core.in_flight == PLANS_IN_FLIGHT
    assert all(plan.can_abandon for plan in harness.plans)
    harness.begin_pass()
    harness.core.submit(request_of(9, is_batch=False), 0.0)
    harness.plan()
    urgent = harness.plans[-1]
    assert not urgent.can_abandon
    assert [opened.request_id for opened in urgent.opens] == ["chat9"]
    assert len(urgent.closes) == 4
    harness.run()
    assert harness.abandoned == PLANS_IN_FLIGHT
    assert harness.outputs["chat9", 0] == expected(9)
    for number in range(4):
        assert harness.outputs[f"line{number}", 0] == expected(number)
    harness.audit()


def test_a_plan_with_an_interactive_row_is_never_abandoned() -> None:
    harness = AbandoningHarness(max_step_tokens=64)
    harness.core.submit(request_of(1, is_batch=False), 0.0)
    harness.core.submit(request_of(2, is_batch=True), 0.0)
    while ("chat1", 0) not in harness.finishes:
        harness.plan()
        harness.result()
        if harness.core.rows.running > harness.core.rows.batch_rows:
            assert not harness.plans[-1].can_abandon
    harness.run()
    assert harness.abandoned == 0


def test_workers_that_cannot_abandon_passes_get_no_plan_to_abandon() -> None:
    harness = Harness(abandons_passes=False)
    harness.core.submit(request_of(1, is_batch=True), 0.0)
    harness.run()
    assert harness.plans
    assert not any(plan.can_abandon for plan in harness.plans)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "given",
    [{}, {"target_plan_s": 1.0}, {"draft_tokens": 4}, {"window": 8, "window_pool": 64}, {"cache": "user_aware"}],
    ids=["plain", "multi-step", "drafts", "window", "shared"],
)
def test_random_arrivals_change_no_token(seed: int, given: dict[str, Any]) -> None:
    chance = random.Random(seed)
    harness = AbandoningHarness(max_step_tokens=chance.choice([8, 16, 64]), **given)
    lines, chats = 6, 5
    for number in range(lines):
        harness.core.submit(request_of(number, is_batch=True), 0.0)
    numbers = list(range(lines, lines + chats))
    while numbers:
        harness.plan()
        for _ in range(chance.randrange(4)):
            harness.result()
        if chance.random() < 0.5:
            harness.plan()
        if chance.random() < 0.5:
            harness.begin_pass()
        if chance.random() < 0.3:
            harness.core.submit(request_of(numbers.pop(), is_batch=False), 0.0)
    harness.run()
    assert len(harness.finishes) == lines + chats
    for number in range(lines):
        assert harness.outputs[f"line{number}", 0] == expected(number)
    for number in range(lines, lines + chats):
        assert harness.outputs[f"chat{number}", 0] == expected(number)
    assert harness.core.in_flight == 0
    harness.audit()
