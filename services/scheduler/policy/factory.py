"""Makes the policy that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from services.scheduler.policy.first_come import FirstComeFirstServed
from services.scheduler.policy.longest_prefix import LongestPrefixMatch
from services.scheduler.policy.priority import PriorityFirst

if TYPE_CHECKING:
    from services.scheduler.core.queue import Policy

PolicyName = Literal["fcfs", "lpm", "priority"]


def make_policy(name: PolicyName) -> Policy:
    """Return the policy; `SchedulerSettings.policy` tells the names."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch()
        case "priority":
            return PriorityFirst()
        case _:
            assert_never(name)
