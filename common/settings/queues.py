"""The waiting queue's part of the scheduler's section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.settings.sessions import SessionSettings


class QueueSettings(SessionSettings):
    """The waiting queue: its order and its length."""

    policy: Literal["fcfs", "lpm", "priority", "fair"] = "fair"
    """Order of the waiting queue. fcfs: by arrival. lpm: longest cached prefix first. priority: by the requests'
    priority. fair: fair shares of tenants, and of subjects within each tenant, by the weights in the limits file;
    running requests are preempted for a tenant or subject that has less than its share, and continue later with the
    same tokens; a subject that waits alone is served in order of arrival."""
    limits_file: Path | None = None
    """TOML file with limits of tenants and subjects, the same file as gateway.limits_file; reloaded when it changes.
    Absent: all have equal weights, quotas and floors."""
    priority_preemptions: int = Field(default=2, ge=0)
    """With policy priority: how often a running request may be preempted by a waiting one of higher priority when rows
    or pages are exhausted; it continues later with the same tokens. 0: running requests are not preempted."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Length of the waiting queue; further requests are refused with a hint when to retry. The limits file can bound
    tenants and subjects (waiting). Otherwise a tenant may have three times as many requests waiting as places are free,
    and a subject as many as its tenant may still add, so that a flood leaves places for others."""
    fair_output_weight: float = Field(default=2.0, ge=0)
    """With policy fair: cost of a generated token, relative to a prompt token that is not cached."""
    fair_slack_tokens: float = Field(default=512.0, ge=0)
    """With policy fair: weighted tokens by which a tenant, or a subject within its tenant, may be ahead of the least
    served one, so that requests with longer cached prefixes can go first; the default is about one prefill step. 0:
    strictly the least served first."""
