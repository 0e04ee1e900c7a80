"""Requests and their parts, from and to protobuf."""

from __future__ import annotations

import numpy as np

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import (
    CacheMode,
    Pooling,
    ReplyTo,
    RequestId,
    Resume,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    SubscriberId,
    TraceContext,
)
from common.wire.grammars import grammar_from_wire, grammar_to_wire
from common.wire.identity import view_from_wire, view_to_wire
from common.wire.prompt_logprobs import prompt_logprobs_from_wire, prompt_logprobs_to_wire
from common.wire.sessions import turn_from_wire, turn_to_wire
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

_CACHE_MODES = {
    CacheMode.DEFAULT: common_pb2.CACHE_MODE_DEFAULT,
    CacheMode.PRIVATE: common_pb2.CACHE_MODE_PRIVATE,
    CacheMode.NONE: common_pb2.CACHE_MODE_NONE,
}

_POOLINGS = {pooling: common_pb2.Pooling.Value(f"POOLING_{pooling.name}") for pooling in Pooling}
_POOLINGS_BACK = {wire: pooling for pooling, wire in _POOLINGS.items()}


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Encode sampling parameters."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
        top_logprobs=sampling.top_logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
        banned_sequences=[common_pb2.TokenSequence(token_ids=ids) for ids in sampling.banned_sequences],
        grammar=grammar_to_wire(sampling.grammar),
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """Decode sampling parameters; top_p and repetition_penalty of 0 (unset) mean 1, which is "off"."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_sequences=tuple(tuple(banned.token_ids) for banned in message.banned_sequences),
        grammar=grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
    )


def stop_to_wire(stop: StopConditions) -> common_pb2.StopConditions:
    """Encode stop conditions."""
    return common_pb2.StopConditions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
        stop_strings=stop.stop_strings,
        ignore_eos=stop.ignore_eos,
        include_stop_text=stop.include_stop_text,
        stop_patterns=stop.stop_patterns,
    )


def stop_from_wire(message: common_pb2.StopConditions) -> StopConditions:
    """Decode stop conditions."""
    return StopConditions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
        include_stop_text=message.include_stop_text,
        stop_patterns=tuple(message.stop_patterns),
    )


def cache_mode_to_wire(mode: CacheMode) -> common_pb2.CacheMode.ValueType:
    """Encode a cache mode."""
    return _CACHE_MODES[mode]


def cache_mode_from_wire(value: common_pb2.CacheMode.ValueType) -> CacheMode:
    """Decode a cache mode; unset means the default."""
    return next((mode for mode, encoded in _CACHE_MODES.items() if encoded == value), CacheMode.DEFAULT)


def pooling_to_wire(pooling: Pooling | None) -> common_pb2.Pooling.ValueType:
    """Encode a pooling; None, for requests that generate, becomes UNSPECIFIED."""
    return common_pb2.POOLING_UNSPECIFIED if pooling is None else _POOLINGS[pooling]


def pooling_from_wire(value: common_pb2.Pooling.ValueType) -> Pooling | None:
    """Decode a pooling; UNSPECIFIED means that the request generates.

    Raises:
        InvalidRequestError: the value is unknown (of a newer peer); to generate instead would be wrong.
    """
    if value != common_pb2.POOLING_UNSPECIFIED and value not in _POOLINGS_BACK:
        raise InvalidRequestError(f"pooling {value} is not supported", param="pooling")
    return _POOLINGS_BACK.get(value)


def reply_to_wire(reply_to: ReplyTo) -> common_pb2.ReplyTo:
    """Encode the destination of a request's output."""
    return common_pb2.ReplyTo(subscriber_id=reply_to.subscriber_id, detokenizer=reply_to.detokenizer)


def reply_to_from_wire(message: common_pb2.ReplyTo) -> ReplyTo:
    """Decode the destination of a request's output.

    Raises:
        InvalidRequestError: the subscriber is missing.
    """
    if not message.subscriber_id:
        raise InvalidRequestError("reply_to.subscriber_id must be set", param="reply_to")
    detokenizer = message.detokenizer if message.HasField("detokenizer") else None
    return ReplyTo(SubscriberId(message.subscriber_id), detokenizer)


def trace_to_wire(trace: TraceContext | None) -> common_pb2.TraceContext | None:
    """Encode a trace context, if there is one."""
    return common_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate) if trace else None


def trace_from_wire(message: common_pb2.TraceContext) -> TraceContext | None:
    """Decode a trace context; empty means none."""
    if not message.traceparent:
        return None
    return TraceContext(message.traceparent, message.tracestate if message.HasField("tracestate") else None)


def resume_to_wire(resume: Resume | None) -> common_pb2.Resume | None:
    """Encode the part of an interrupted choice that the client has, if there is one."""
    if resume is None:
        return None
    return common_pb2.Resume(token_ids=resume.token_ids, delivered_characters=resume.delivered_characters)


def resume_from_wire(message: common_pb2.Resume) -> Resume:
    """Decode the part of an interrupted choice that the client has; callers check HasField first."""
    return Resume(tuple(message.token_ids), message.delivered_characters)


def session_from_wire(message: scheduler_pb2.ScheduleRequest | tokenizer_pb2.GenerateRequest) -> str | None:
    """Decode the name of a request's session; None if it has none.

    Raises:
        InvalidRequestError: it is not a valid name.
    """
    return check_name("session", message.session) if message.session else None


def schedule_request_to_wire(request: ScheduleRequest) -> scheduler_pb2.ScheduleRequest:
    """Encode a validated request for the scheduler."""
    message = scheduler_pb2.ScheduleRequest(
        request_id=request.request_id,
        view=view_to_wire(request.view),
        reply_to=reply_to_wire(request.reply_to),
        sampling=sampling_to_wire(request.sampling),
        stop=stop_to_wire(request.stop),
        n=request.n,
        priority=request.priority,
        cache_mode=cache_mode_to_wire(request.cache_mode),
        skip_special_tokens=request.skip_special_tokens,
        resume=resume_to_wire(request.resume),
        timeout_ms=request.timeout_ms,
        trace=trace_to_wire(request.trace),
        session=request.session,
        turn=turn_to_wire(request.turn),
        max_context_tokens=request.max_context_tokens,
        pooling=pooling_to_wire(request.pooling),
        prompt_logprobs=prompt_logprobs_to_wire(request.prompt_logprobs),
    )
    message.token_ids.extend(request.token_ids.tolist())
    return message


def schedule_request_from_wire(message: scheduler_pb2.ScheduleRequest) -> ScheduleRequest:
    """Decode a request for the scheduler.

    Raises:
        InvalidRequestError: view, reply_to, request id or prompt is missing, or a part of it is invalid.
    """
    if not message.request_id:
        raise InvalidRequestError("request_id must be set", param="request_id")
    check_name("request_id", message.request_id)
    if not message.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return ScheduleRequest(
        request_id=RequestId(message.request_id),
        view=view_from_wire(message.view),
        reply_to=reply_to_from_wire(message.reply_to),
        token_ids=np.array(message.token_ids, dtype=np.int32),
        sampling=sampling_from_wire(message.sampling),
        stop=stop_from_wire(message.stop),
        n=max(message.n, 1),
        priority=message.priority,
        cache_mode=cache_mode_from_wire(message.cache_mode),
        skip_special_tokens=message.skip_special_tokens,
        resume=resume_from_wire(message.resume) if message.HasField("resume") else None,
        timeout_ms=message.timeout_ms if message.HasField("timeout_ms") else None,
        trace=trace_from_wire(message.trace),
        session=session_from_wire(message),
        turn=turn_from_wire(message),
        max_context_tokens=message.max_context_tokens if message.HasField("max_context_tokens") else None,
        pooling=pooling_from_wire(message.pooling),
        prompt_logprobs=prompt_logprobs_from_wire(message),
    )
