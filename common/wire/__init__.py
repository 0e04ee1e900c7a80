"""Conversion between protobuf messages that several services exchange and the dataclasses of `common`.

Messages that only one service reads are converted by that service's own `wire.py`.
"""

from __future__ import annotations

from common.wire.answers import (
    admission_from_wire,
    admission_to_wire,
    failure_from_wire,
    failure_to_wire,
    finish_from_wire,
    finish_reason_from_wire,
    finish_reason_to_wire,
    finish_to_wire,
    logprob_from_wire,
    logprob_to_wire,
)
from common.wire.grammars import grammar_from_wire, grammar_to_wire
from common.wire.identity import subject_from_wire, subject_to_wire, view_from_wire, view_to_wire
from common.wire.prompt_logprobs import prompt_logprobs_from_wire, prompt_logprobs_to_wire, span_from_wire, span_to_wire
from common.wire.requests import (
    cache_mode_from_wire,
    cache_mode_to_wire,
    pooling_from_wire,
    pooling_to_wire,
    reply_to_from_wire,
    reply_to_wire,
    resume_from_wire,
    resume_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    schedule_request_from_wire,
    schedule_request_to_wire,
    session_from_wire,
    stop_from_wire,
    stop_to_wire,
    trace_from_wire,
    trace_to_wire,
)
from common.wire.sessions import (
    close_from_wire,
    close_to_wire,
    grant_from_wire,
    grant_to_wire,
    turn_from_wire,
    turn_to_wire,
    wish_from_wire,
    wish_to_wire,
)

__all__ = [
    "admission_from_wire",
    "admission_to_wire",
    "cache_mode_from_wire",
    "cache_mode_to_wire",
    "close_from_wire",
    "close_to_wire",
    "failure_from_wire",
    "failure_to_wire",
    "finish_from_wire",
    "finish_reason_from_wire",
    "finish_reason_to_wire",
    "finish_to_wire",
    "grammar_from_wire",
    "grammar_to_wire",
    "grant_from_wire",
    "grant_to_wire",
    "logprob_from_wire",
    "logprob_to_wire",
    "pooling_from_wire",
    "pooling_to_wire",
    "prompt_logprobs_from_wire",
    "prompt_logprobs_to_wire",
    "reply_to_from_wire",
    "reply_to_wire",
    "resume_from_wire",
    "resume_to_wire",
    "sampling_from_wire",
    "sampling_to_wire",
    "schedule_request_from_wire",
    "schedule_request_to_wire",
    "session_from_wire",
    "span_from_wire",
    "span_to_wire",
    "stop_from_wire",
    "stop_to_wire",
    "subject_from_wire",
    "subject_to_wire",
    "trace_from_wire",
    "trace_to_wire",
    "turn_from_wire",
    "turn_to_wire",
    "view_from_wire",
    "view_to_wire",
    "wish_from_wire",
    "wish_to_wire",
]
