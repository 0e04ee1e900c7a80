"""The part of the scheduler's section that is about who goes next."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.settings.sessions import SessionSettings


class QueueSettings(SessionSettings):
    """Order and length of the waiting queue."""

    policy: Literal["fcfs", "lpm", "priority", "fair"] = "fair"
    """Order of the waiting queue: arrival, longest cached prefix, the request's priority, or fair shares of tenants and
    of the subjects of each, by the weights in the limits file."""
    limits_file: Path | None = None
    """TOML file with limits of tenants and subjects, the same that gateway.limits_file names; read again when it
    changes. Absent: all have equal weights, quotas and floors."""
    priority_preemptions: int = Field(default=2, ge=0)
    """With policy priority: how often one running request may make way for a waiting one of higher priority when there
    is no room; it goes on later with the same tokens. 0: running requests stay."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Length of the waiting queue; more are refused with a hint when to retry. The limits file bounds tenants and
    subjects (waiting); otherwise a tenant may have three times as many waiting as there are places left, and a subject
    as many as its tenant may still add, so that a flood leaves room for others."""
    fair_output_weight: float = Field(default=2.0, ge=0)
    """With policy fair: what a generated token counts, in tokens of prompt that was not cached."""
    fair_slack_tokens: float = Field(default=512.0, ge=0)
    """With policy fair: so many weighted tokens may tenants, and subjects of one tenant, be served beyond the least
    served one, to find longer cached prefixes first: about one step of prefill; 0: strictly the least served first."""
