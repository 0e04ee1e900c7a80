"""A prompt does not wait for queued passes that decode, and no token is lost or computed wrong by leaving them out."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.types import RequestId
from services.scheduler.core.drafts import Guess, Origin
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import BOUND, STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.grammars import Grammar
    from common.steps import StepPlan, StepResult
    from common.types import RowSlot, ScheduleRequest

TOKENS = 40
PLANS_IN_FLIGHT = 2
MAX_STEPS = 8


class ShorteningHarness(Harness):
    """Runs passes one by one when results are asked for, and leaves out those that a later plan need not wait for."""

    def __init__(self, *, target_plan_s: float = 1.0, abandons_passes: bool = True, **given: Any) -> None:
        given = {"pages": 160, "max_rows": 4, "max_step_tokens": 64, **given}
        super().__init__(target_plan_s=target_plan_s, abandons_passes=abandons_passes, **given)
        self._waiting: deque[StepPlan] = deque()
        self._running: Iterator[StepResult] = iter(())
        self.left_out: list[StepResult] = []
        # Plans that were sent although the pipeline was full.
        self.lengthened = 0

    def plan(self) -> None:
        while self.core.in_flight < self.depth or self.core.can_overtake:
            plan = self.core.plan(self.now, epoch=0)
            if plan is None:
                break
            self.plans.append(plan)
            self._waiting.append(plan)
            self.lengthened += self.core.in_flight > PLANS_IN_FLIGHT
        assert self.core.in_flight <= PLANS_IN_FLIGHT + 1
        self.collect()

    def result(self) -> bool:
        result = next(self._running, None)
        if result is None and self._waiting:
            plan = self._waiting.popleft()
            self._running = self.worker.run_lazily(plan, lambda: any(later.prefills for later in self._waiting))
            result = next(self._running)
        if result is None:
            return False
        if result.abandoned:
            self.left_out.append(result)
        self.results.append(result)
        return super().result()

    def decode(self) -> None:
        """Go on until plans that can be shortened fill the pipeline, and one pass of the first has ended."""
        for _ in range(100):
            self.plan()
            oldest, *_ = newest = self.plans[-PLANS_IN_FLIGHT:]
            fills = len(newest) == self.core.in_flight and all(plan.steps > 1 for plan in newest)
            assert self.result()
            if fills and oldest not in self._waiting:
                return
        raise AssertionError("the pipeline is never full")


def prompt_of(number: int, length: int = 24) -> list[int]:
    return [100 + number, *range(length - 1)]


def request_of(number: int, tokens: int = TOKENS, length: int = 24) -> ScheduleRequest:
    return make_request(f"r{number}", prompt_of(number, length), user=f"u{number % 3}", max_tokens=tokens)


def expected(number: int, tokens: int = TOKENS, length: int = 24) -> list[int]:
    prompt = prompt_of(number, length)
    return expected_output(prompt, len(prompt) + tokens, (STOP_ID,))


def test_a_prompt_is_computed_after_the_pass_under_way() -> None:
    harness = ShorteningHarness()
    harness.core.submit(request_of(1), 0.0)
    harness.core.submit(request_of(2), 0.0)
    harness.decode()
    first, second = harness.plans[-2:]
    assert first.can_shorten
    assert second.can_shorten
    known = len(harness.outputs["r1", 0])
    harness.core.submit(request_of(3), 0.0)
    harness.plan()
    third = harness.plans[-1]
    assert [opened.request_id for opened in third.opens] == ["r3"]
    assert harness.core.in_flight == PLANS_IN_FLIGHT + 1
    while not harness.outputs.get(("r3", 0)):
        assert harness.result()
    assert [(result.step_id, result.substep) for result in harness.left_out] == [
        (first.step_id, 1),
        (second.step_id, 0),
    ]
    assert len(harness.outputs["r1", 0]) == known + 1
    harness.run()
    for number in (1, 2, 3):
        assert harness.outputs[f"r{number}", 0] == expected(number)
    harness.audit()


def test_rows_that_were_planned_to_their_limit_go_on() -> None:
    harness = ShorteningHarness()
    # Its last tokens are in the plans that are left out.
    tokens = 2 + MAX_STEPS + 4
    harness.core.submit(request_of(1, tokens), 0.0)
    harness.decode()
    assert harness.core.rows.running == 1
    assert not len(harness.core.rows.live())
    harness.core.submit(request_of(2), 0.0)
    harness.run()
    assert harness.left_out
    assert harness.outputs["r1", 0] == expected(1, tokens)
    assert harness.outputs["r2", 0] == expected(2)
    harness.audit()


def test_without_a_free_row_the_pipeline_is_no_longer_than_usual() -> None:
    harness = ShorteningHarness(max_rows=2)
    harness.core.submit(request_of(1), 0.0)
    harness.core.submit(request_of(2), 0.0)
    harness.decode()
    harness.core.submit(request_of(3), 0.0)
    assert not harness.core.can_overtake
    harness.run()
    assert not harness.left_out
    assert harness.outputs["r3", 0] == expected(3)


def test_after_a_prompt_that_has_no_pages_the_pipeline_is_no_longer_than_usual() -> None:
    harness = ShorteningHarness(pages=20)
    harness.core.submit(request_of(1), 0.0)
    harness.core.submit(request_of(2, 10, 60), 0.0)
    harness.decode()
    harness.core.submit(request_of(3), 0.0)
    assert harness.core.rows.running == 1
    assert not harness.core.can_overtake
    harness.run()
    assert harness.outputs["r2", 0] == expected(2, 10, 60)


def test_a_prompt_that_waits_for_something_else_lengthens_the_pipeline_once() -> None:
    harness = ShorteningHarness()
    harness.core.submit(request_of(1), 0.0)
    harness.decode()
    harness.core.hold_new(held=True)
    harness.core.submit(request_of(2), 0.0)
    for _ in range(2 * MAX_STEPS):
        harness.plan()
        assert harness.result()
    assert harness.lengthened == 1
    assert not harness.left_out
    harness.core.hold_new(held=False)
    harness.run()
    assert harness.outputs["r2", 0] == expected(2)


def test_a_prompt_waits_for_queued_prompts() -> None:
    harness = ShorteningHarness()
    harness.core.submit(request_of(1), 0.0)
    harness.decode()
    harness.core.submit(request_of(2), 0.0)
    harness.plan()
    assert harness.plans[-1].prefills
    while harness.core.in_flight > PLANS_IN_FLIGHT:
        assert harness.result()
    harness.core.submit(request_of(3), 0.0)
    assert not harness.core.can_overtake
    harness.run()
    assert harness.outputs["r3", 0] == expected(3)


@pytest.mark.parametrize("passes", [0, 3, MAX_STEPS])
def test_a_request_without_memory_pays_for_idle_rows_only_in_passes_that_have_run(passes: int) -> None:
    harness = ShorteningHarness(policy="fair", pages=24, max_rows=2)
    harness.core.submit(request_of(0), 0.0)
    harness.decode()
    large = make_request("large", prompt_of(1, 70), user="large")
    assert harness.counters is not None
    harness.core.submit(large, 0.0)
    # It could run in the free row, in the pages that are kept for the other one.
    harness.core.submit(make_request("small", prompt_of(2, 4), user="small"), 0.0)
    harness.plan()
    charged = harness.plans[-1]
    assert (charged.steps, charged.can_shorten, charged.opens) == (MAX_STEPS, True, ())
    assert harness.counters.of_subject(large.view.subject) == 2 * MAX_STEPS
    while harness.core.in_flight > 1:
        assert harness.result()
    for _ in range(passes):
        assert harness.result()
    harness.plan()
    following = harness.plans[harness.plans.index(charged) + 1]
    assert [opened.request_id for opened in following.opens] == ["small"]
    assert harness.result()
    assert [(result.step_id, result.substep) for result in harness.left_out] == [
        (charged.step_id, substep) for substep in [passes] if substep < MAX_STEPS
    ]
    assert harness.counters.of_subject(large.view.subject) == 2 * passes
    harness.run()
    assert harness.outputs["large", 0]
    harness.audit()


class ConstantGuesses:
    """Guesses the same wrong token again and again."""

    def guess(self, _row: RowSlot, most: int) -> Guess | None:
        return Guess(np.full(most, 3, np.int32), Origin.CACHE)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"abandons_passes": False}, None), ({"window": 8, "window_pool": 64}, None), ({"snapshots": 32}, None),
        ({"jump_tokens": 8}, BOUND),
        ({"draft_tokens": 4, "make_sources": lambda _rows, _cache: ConstantGuesses()}, None),
    ],
    ids=["several ranks", "window", "states", "jumps", "drafts"],
)  # fmt: skip
def test_plans_that_cannot_be_shortened(given: dict[str, Any], grammar: Grammar | None) -> None:
    harness = ShorteningHarness(**given)
    harness.core.submit(make_request("r1", prompt_of(1), max_tokens=TOKENS, grammar=grammar), 0.0)
    harness.run()
    plans = [plan for plan in harness.plans if plan.drafts or "draft_tokens" not in given]
    assert plans
    assert not any(plan.can_shorten for plan in plans)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "given",
    [
        {}, {"target_plan_s": 0.0}, {"max_step_tokens": 8}, {"max_step_tokens": 12, "mixed_step_tokens": 4},
        {"pages": 40}, {"cache": "user_aware"}, {"cache": "shared", "policy": "fair"},
        {"policy": "priority", "max_preemptions": 2},
    ],
    ids=["plain", "single steps", "small steps", "mixed steps", "few pages", "user-aware", "fair", "priority"],
)  # fmt: skip
def test_random_arrivals_change_no_token(seed: int, given: dict[str, Any]) -> None:
    chance = random.Random(seed)
    harness = ShorteningHarness(**given)
    numbers = list(range(12))
    sizes = {number: (chance.randrange(1, TOKENS), chance.randrange(2, 40)) for number in numbers}
    aborted = set()
    for number in numbers:
        harness.core.submit(request_of(number, *sizes[number]), 0.0)
        for _ in range(chance.randrange(12)):
            harness.plan()
            harness.result()
        if chance.random() < 0.1:
            harness.core.abort(RequestId(f"r{number}"))
            aborted.add(number)
        harness.check_accounts()
    harness.run()
    for number in set(numbers) - aborted:
        assert harness.outputs[f"r{number}", 0] == expected(number, *sizes[number]), number
    assert harness.core.in_flight == 0
    harness.audit()
