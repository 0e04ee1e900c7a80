"""The part of the scheduler's section that is about who goes next."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.settings.sessions import SessionSettings

Weight = Annotated[float, Field(gt=0)]


class QueueSettings(SessionSettings):
    """Order and length of the waiting queue."""

    policy: Literal["fcfs", "lpm", "priority", "fair"] = "fcfs"
    """Order of the waiting queue: arrival, longest cached prefix, the request's priority, or fair shares of users."""
    priority_preemptions: int = Field(default=2, ge=0)
    """With policy priority: how often one running request may make way for a waiting one of higher priority when there
    is no room; it goes on later with the same tokens. 0: running requests stay."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Length of the waiting queue; more are refused with a hint when to retry."""
    max_waiting_per_user: int = Field(default=0, ge=0)
    """How many of them one user may have; 0: half, so that a flood of one leaves room for the others."""
    fair_weights: dict[str, Weight] = Field(default_factory=dict)
    """With policy fair: the weight of each tenant's users, as JSON; a user of weight 2 gets twice the tokens, and
    tenants that are not named weigh 1."""
    fair_output_weight: float = Field(default=2.0, ge=0)
    """With policy fair: what a generated token counts, in tokens of prompt that was not cached."""
    fair_slack_tokens: float = Field(default=512.0, ge=0)
    """With policy fair: so many weighted tokens may users be served beyond the least served one, to find longer cached
    prefixes first: about one step of prefill; 0: strictly the least served first."""
    fair_tenant_counts_as_one: bool = False
    """With policy fair: give shares to tenants instead of users, where who holds an API key can invent users."""
