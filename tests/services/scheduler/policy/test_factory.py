from __future__ import annotations

from typing import get_args

import pytest

from common.settings import QueueSettings
from services.scheduler.policy.policies import (
    FairShare,
    FirstComeFirstServed,
    LongestPrefixMatch,
    PolicyName,
    PriorityFirst,
    make_order,
    make_policy,
)
from tests.services.scheduler.policy.waiting import handles, line_up, waiting_sequence


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fcfs", FirstComeFirstServed), ("lpm", LongestPrefixMatch), ("priority", PriorityFirst), ("fair", FairShare)],
)
def test_each_name_makes_its_policy(name: PolicyName, kind: type) -> None:
    order = make_order(QueueSettings(policy=name))
    assert (order.counters is not None) == (name == "fair")
    assert isinstance(order.policy, kind)


def test_the_settings_offer_exactly_these_names() -> None:
    assert get_args(QueueSettings.model_fields["policy"].annotation) == get_args(PolicyName)


def test_first_come_is_first_served() -> None:
    waiting = [waiting_sequence(handle, priority=handle) for handle in range(3)]
    assert handles(make_policy("fcfs").order(line_up(waiting), lambda _: 0)) == [0, 1, 2]
