"""Timelines of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import FinishReason
from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from services.scheduler.core.milestones import MilestoneKind
from services.scheduler.core.sequence import Wait

if TYPE_CHECKING:
    from services.scheduler.core.milestones import Milestone
    from services.scheduler.timelines import RequestTimeline

_KINDS = {kind: scheduler_pb2.MilestoneKind.Value(f"MILESTONE_KIND_{kind.name}") for kind in MilestoneKind}
_WAITS = {wait: scheduler_pb2.WaitReason.Value(f"WAIT_REASON_{wait.name}") for wait in Wait}

_FINISH_REASONS = {reason: common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def timeline_to_wire(request_id: str, timeline: RequestTimeline) -> scheduler_pb2.RequestTimeline:
    """Encode a timeline."""
    milestones = (_milestone_to_wire(unix_s, milestone) for unix_s, milestone in timeline.milestones)
    return scheduler_pb2.RequestTimeline(
        request_id=request_id, prompt_tokens=timeline.prompt_tokens, milestones=milestones
    )


def _milestone_to_wire(unix_s: float, milestone: Milestone) -> scheduler_pb2.Milestone:
    message = scheduler_pb2.Milestone(
        kind=_KINDS[milestone.kind],
        unix_s=unix_s,
        choice_index=milestone.choice_index,
        output_tokens=milestone.output_tokens,
        charged_tokens=milestone.charged_tokens,
    )
    if milestone.wait is not None:
        message.wait = _WAITS[milestone.wait]
    if milestone.found is not None:
        found = milestone.found
        message.found.CopyFrom(
            scheduler_pb2.FoundTokens(
                tokens=found.tokens,
                public_tokens=found.public_tokens,
                tenant_tokens=found.tenant_tokens,
                host_tokens=found.host_tokens,
                storage_tokens=found.storage_tokens,
            )
        )
    if milestone.finish is not None:
        message.finish_reason = _FINISH_REASONS[milestone.finish.reason]
    return message
