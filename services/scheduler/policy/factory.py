"""Creates the configured policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.fair_share import FairShare
from services.scheduler.policy.first_come import FirstComeFirstServed
from services.scheduler.policy.longest_prefix import LongestPrefixMatch
from services.scheduler.policy.priority import PriorityFirst

if TYPE_CHECKING:
    from common.settings import QueueSettings
    from services.scheduler.core.queue import Policy

PolicyName = Literal["fcfs", "lpm", "priority", "fair"]


def make_counters(settings: QueueSettings) -> VirtualCounters | None:
    """Return the counters that the policy needs, None if it needs none."""
    if settings.policy != "fair":
        return None
    return VirtualCounters(ShareConfig(output_weight=settings.fair_output_weight))


def make_policy(name: PolicyName, counters: VirtualCounters | None = None, slack_tokens: float = 512.0) -> Policy:
    """Return the policy of a `QueueSettings.policy` name. `fair` reads `counters`, which the core updates."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch()
        case "priority":
            return PriorityFirst()
        case "fair":
            assert counters is not None, "fair shares are by counters"
            return FairShare(counters, slack_tokens)
        case _:
            assert_never(name)
