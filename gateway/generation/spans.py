"""The gateway's spans of a request, by the semantic conventions for generative AI (`gen_ai.*`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.spans import SpanEvent, TraceSpan
from common.tracing import is_recorded, record, record_span

if TYPE_CHECKING:
    from common.spans import Value
    from gateway.generation.recent import RecentRequest


def record_request(request: RecentRequest, response_id: str) -> None:
    """Report an ended request: its span, under which the other services put theirs, and that of its delivery."""
    trace, ended_at = request.trace, request.ended_at
    if trace is None or ended_at is None or not is_recorded(trace):
        return
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "pando",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": response_id,
        "pando.resubmissions": request.resubmissions,
        "pando.status": request.status,
    }
    if request.usage is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": request.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": request.usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.usage.cached_tokens,
        }
    events = []
    if request.first_token_at is not None:
        attributes["gen_ai.server.time_to_first_token"] = request.first_token_at - request.received_at
        events.append(SpanEvent("gen_ai.first_token", request.first_token_at))
        record("deliver", trace, request.first_token_at, ended_at, {})
    error = None if request.failure is None else request.failure.value
    own = TraceSpan(
        f"{request.operation} {request.model}", trace, request.received_at, ended_at, attributes, events, error
    )
    record_span(replace(own, is_root=True, parent_id=trace.parent_id))
