"""The plan behind a long pass is made shortly before this pass ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from common.settings import SchedulerSettings
from common.steps import StepResult
from common.types import StepId
from services.scheduler.group import GroupState
from services.scheduler.loop import SchedulerLoop
from services.scheduler.plan_pacing import ERRORS_OF_LEAD, LEAST_LEAD_S, PlanPacing
from tests.services.scheduler.core.harness import Harness, make_request

if TYPE_CHECKING:
    import asyncio

LONG_S = 0.1


class Alarm:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Bench:
    """A pacing whose time is set, which has seen one pass end when it was expected to."""

    def __init__(self, *, holds_back: bool = True, error_s: float | None = 0.0) -> None:
        self.time = 0.0
        self.alarms: list[Alarm] = []
        self.pacing = PlanPacing(lambda: self.time, self._later, holds_back=holds_back)
        if error_s is not None:
            self.pass_of(expected_s=LONG_S, lasting_s=LONG_S - error_s)

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        self.alarms.append(Alarm(seconds))
        handle: Any = self.alarms[-1]
        return handle  # type: ignore[no-any-return]

    def pass_of(self, expected_s: float, lasting_s: float) -> None:
        self.pacing.sent(expected_s)
        self.time += lasting_s
        self.pacing.ended()

    def first_turn(self) -> float:
        """Return after how many seconds of a long pass it is no longer early."""
        begun = self.time
        self.pacing.sent(LONG_S)
        while self.pacing.is_early():
            self.time += 0.001
        return self.time - begun


def test_the_plan_behind_a_long_pass_is_made_shortly_before_its_end() -> None:
    assert Bench().first_turn() == pytest.approx(LONG_S - LEAST_LEAD_S, abs=0.0015)


def test_passes_that_ended_early_let_plans_be_made_earlier() -> None:
    assert Bench(error_s=0.02).first_turn() == pytest.approx(LONG_S - LEAST_LEAD_S - ERRORS_OF_LEAD * 0.02, abs=0.0015)
    assert Bench(error_s=-0.5).first_turn() == pytest.approx(LONG_S - LEAST_LEAD_S, abs=0.0015)


def test_another_turn_comes_when_the_plan_is_due() -> None:
    bench = Bench()
    bench.pacing.sent(LONG_S)
    bench.time += 0.03
    assert bench.pacing.is_early()
    bench.time += 0.04
    assert bench.pacing.is_early()
    assert [alarm.seconds for alarm in bench.alarms] == pytest.approx([0.06, 0.02])
    assert [alarm.is_cancelled for alarm in bench.alarms] == [True, False]


@pytest.mark.parametrize("expected_s", [0.0, 0.02])
def test_nothing_waits_behind_a_short_pass_or_one_of_unknown_length(expected_s: float) -> None:
    bench = Bench()
    bench.pacing.sent(expected_s)
    assert not bench.pacing.is_early()
    assert not bench.alarms


def test_nothing_waits_where_no_pass_was_compared_with_what_was_expected() -> None:
    bench = Bench(error_s=None)
    bench.pass_of(expected_s=0.0, lasting_s=0.5)
    assert bench.first_turn() == 0.0


def test_nothing_waits_while_no_plan_or_two_are_in_flight() -> None:
    bench = Bench()
    assert not bench.pacing.is_early()
    bench.pacing.sent(LONG_S)
    bench.pacing.sent(LONG_S)
    assert not bench.pacing.is_early()


def test_a_pass_begins_when_the_one_before_it_ends() -> None:
    bench = Bench()
    bench.pacing.sent(0.02)
    bench.pacing.sent(LONG_S)
    bench.time += 0.5
    bench.pacing.ended()
    bench.time += LONG_S - LEAST_LEAD_S - 0.005
    assert bench.pacing.is_early()
    bench.time += 0.01
    assert not bench.pacing.is_early()


def test_plans_of_lost_workers_are_forgotten() -> None:
    bench = Bench()
    bench.pacing.sent(LONG_S)
    bench.pacing.lost()
    assert not bench.pacing.is_early()
    bench.time += 5.0
    assert bench.first_turn() == pytest.approx(LONG_S - LEAST_LEAD_S, abs=0.0015)


def test_plans_are_made_at_once_unless_they_are_to_be_held_back() -> None:
    assert Bench(holds_back=False).first_turn() == 0.0


async def test_requests_that_arrive_during_a_long_pass_are_in_the_plan_behind_it() -> None:
    time, core = [100.0], MagicMock()
    core.config.micro_batches, core.config.plans_in_flight, core.can_overtake = 1, 2, False
    core.take_output.return_value = None
    loop = SchedulerLoop(SchedulerSettings(late_planning=True), clock=lambda: time[0])
    group, outlets = MagicMock(), MagicMock(is_connected=True)
    group.state = GroupState.READY
    loop.connect(group, outlets)
    loop.core = core

    def plans_after(seconds: float, in_flight: int) -> int:
        time[0] += seconds
        core.in_flight = in_flight
        loop._turn()
        return int(group.send.call_count)

    core.expected_s = LONG_S
    assert plans_after(0.0, in_flight=0) == 1
    time[0] += LONG_S
    loop.on_result(StepResult(StepId(1), 0, last=True))
    assert plans_after(0.0, in_flight=0) == 2
    assert plans_after(LONG_S / 2, in_flight=1) == 2
    assert plans_after(LONG_S / 2, in_flight=1) == 3


@pytest.mark.parametrize(("can_overtake", "sent"), [(False, 0), (True, 1)])
async def test_a_plan_that_overtakes_others_is_sent_although_the_pipeline_is_full(
    *, can_overtake: bool, sent: int
) -> None:
    core = MagicMock(in_flight=2, can_overtake=can_overtake, expected_s=0.0)
    core.config.micro_batches, core.config.plans_in_flight = 1, 2
    core.take_output.return_value = None
    loop = SchedulerLoop(SchedulerSettings())
    group = MagicMock(state=GroupState.READY)
    loop.connect(group, MagicMock(is_connected=True))
    loop.core = core
    loop._turn()
    assert group.send.call_count == sent


@pytest.mark.parametrize(("rate", "decodes", "expected_s"), [(0, False, 0), (500, False, 0.08), (500, True, 0.09)])
def test_the_core_expects_passes_to_take_as_long_as_prompts_and_decoding_took(
    rate: float, *, decodes: bool, expected_s: float
) -> None:
    harness = Harness(max_step_tokens=64, prefill_tokens_per_s=rate)
    harness.core._results.decode_step_s = 0.01
    if decodes:
        harness.core.submit(make_request("other", [1, 2, 3], max_tokens=30), 0.0)
        harness.plan()
    harness.core.submit(make_request("long", list(range(10, 50)), max_tokens=4), 0.0)
    plan = harness.core.plan(0.0, 0)
    assert plan is not None
    assert [chunk.length for chunk in plan.prefills] == [40]
    assert harness.core.expected_s == pytest.approx(expected_s)
