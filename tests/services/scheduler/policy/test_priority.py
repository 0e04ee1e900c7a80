from __future__ import annotations

from services.scheduler.policy.policies import PriorityFirst
from tests.services.scheduler.policy.waiting import handles, waiting_sequence


def test_higher_priority_goes_first_and_equals_by_arrival() -> None:
    waiting = [waiting_sequence(handle, priority=priority) for handle, priority in enumerate([0, -1, 5, 0, 5])]
    assert handles(PriorityFirst().order(waiting, lambda _: 0)) == [2, 4, 0, 3, 1]
