"""When plans are made: behind a long step only shortly before its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from common.settings import SchedulerSettings
from services.scheduler.group import GroupState
from services.scheduler.loop import SchedulerLoop


class Bench:
    """A loop whose core has one step in flight, and makes no plan but counts how often it is asked."""

    def __init__(self, expected_s: float, in_flight: int = 1) -> None:
        self.time = 100.0
        self.asked = 0
        self.loop = SchedulerLoop(SchedulerSettings(queue_depth=2), clock=lambda: self.time)
        group, outlet = SimpleNamespace(state=GroupState.READY), SimpleNamespace(connected=True)
        self.loop.connect(group, outlet)  # type: ignore[arg-type]  # what a turn looks at
        core: Any = SimpleNamespace(
            in_flight=in_flight, expected_step_s=expected_s, plan=self._plan, take_output=lambda: None,
            memory=SimpleNamespace(cache=SimpleNamespace(epoch=0)), apply=lambda _result: None,
        )  # fmt: skip
        self.loop.core = core
        self.loop._newest_since = self.time

    def _plan(self, _now: float, _epoch: int) -> None:
        self.asked += 1

    def turn_at(self, seconds: float) -> int:
        self.time = 100.0 + seconds
        self.loop._turn()
        return self.asked


async def test_who_comes_during_a_long_step_is_in_the_next_plan() -> None:
    bench = Bench(expected_s=0.2)
    assert bench.turn_at(0.0) == 0
    assert bench.turn_at(0.16) == 0
    assert bench.turn_at(0.171) == 1


async def test_it_is_made_by_itself_when_it_is_due() -> None:
    bench = Bench(expected_s=0.06)
    assert bench.turn_at(0.0) == 0
    bench.loop._wake.clear()
    await asyncio.wait_for(bench.loop._wake.wait(), 10)


@pytest.mark.parametrize(("expected_s", "in_flight"), [(0.0, 1), (0.02, 1), (5.0, 0)])
async def test_nothing_waits_behind_a_short_step_or_none(expected_s: float, in_flight: int) -> None:
    assert Bench(expected_s, in_flight).turn_at(0.0) == 1


async def test_a_step_begins_when_the_one_before_it_ends() -> None:
    bench = Bench(expected_s=0.2)
    bench.time += 0.15
    bench.loop.on_result(SimpleNamespace(partial=False, last=True, compute_us=1, token_ids=()))  # type: ignore[arg-type]
    assert bench.turn_at(0.3) == 0
    assert bench.turn_at(0.33) == 1
