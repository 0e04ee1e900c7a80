"""Requests, their options and grammars, on their way from gateways to schedulers, from and to protobuf."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from common.errors import InvalidRequestError
from common.grammars import MAX_GRAMMAR_BYTES, NO_SCOPE, Grammar, GrammarKind, GrammarScope
from common.names import check_name
from common.types import (
    CacheMode,
    GroupRole,
    LoadReport,
    Pooling,
    ReplyTo,
    RequestId,
    RequestOptions,
    Resume,
    RoleSignals,
    RoleWish,
    RowImage,
    SamplingParams,
    ScheduleRequest,
    SessionTurn,
    StopConditions,
    Subject,
    SubscriberId,
    TraceContext,
    View,
)
from common.wire.answers import prompt_logprobs_from_wire, prompt_logprobs_to_wire
from common.wire.identity import view_from_wire, view_to_wire
from common.wire.images import pixels_from_wire, pixels_to_wire
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, sessions_pb2, tokenizer_pb2

# Both messages have a field for each option, under the same name.
RequestMessage: TypeAlias = tokenizer_pb2.GenerateRequest | scheduler_pb2.ScheduleRequest
Message = TypeVar("Message", tokenizer_pb2.GenerateRequest, scheduler_pb2.ScheduleRequest)
_CACHE_MODES = {mode: common_pb2.CacheMode.Value(f"CACHE_MODE_{mode.name}") for mode in CacheMode}
_CACHE_MODES_BACK = {wire: mode for mode, wire in _CACHE_MODES.items()}
_POOLINGS = {pooling: common_pb2.Pooling.Value(f"POOLING_{pooling.name}") for pooling in Pooling}
_POOLINGS_BACK = {wire: pooling for pooling, wire in _POOLINGS.items()}
_KINDS = {kind: common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KINDS_BACK = {wire: kind for kind, wire in _KINDS.items()}


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


def request_id_from_wire(request_id: str) -> RequestId:
    """Decode the id of a request.

    Raises:
        InvalidRequestError: it is missing or not a valid name.
    """
    if not request_id:
        raise InvalidRequestError("request_id must be set", param="request_id")
    return RequestId(check_name("request_id", request_id))


_ROLES = {
    GroupRole.BOTH: scheduler_pb2.SCHEDULER_ROLE_BOTH,
    GroupRole.PREFILL: scheduler_pb2.SCHEDULER_ROLE_PREFILL,
    GroupRole.DECODE: scheduler_pb2.SCHEDULER_ROLE_DECODE,
}
_ROLES_FROM_WIRE = {number: role for role, number in _ROLES.items()}


def role_to_wire(role: GroupRole) -> scheduler_pb2.SchedulerRole.ValueType:
    """Encode the role of a scheduler group."""
    return _ROLES[role]


def role_from_wire(number: scheduler_pb2.SchedulerRole.ValueType) -> GroupRole:
    """Decode the role of a scheduler group; BOTH where it is missing or unknown."""
    return _ROLES_FROM_WIRE.get(number, GroupRole.BOTH)


def load_to_wire(load: LoadReport) -> scheduler_pb2.SchedulerLoad:
    """Encode the load of a scheduler for a tokenizer."""
    message = scheduler_pb2.SchedulerLoad(
        open_choices=load.open_choices,
        serves=load.serves,
        sleeps=load.sleeps,
        role=role_to_wire(load.role),
        free_tokens=load.free_tokens,
    )
    if (signals := load.signals) is not None:
        message.signals.may_change, message.signals.is_changing = signals.may_change, signals.is_changing
        message.signals.waited_ms, message.signals.fullness = round(1000 * signals.waited_s), signals.fullness
        message.signals.own_role, message.signals.follows_load = role_to_wire(signals.own_role), signals.follows_load
    return message


def load_from_wire(message: scheduler_pb2.SchedulerLoad) -> LoadReport:
    """Decode the load of a scheduler."""
    signals = None
    if message.HasField("signals"):
        sent = message.signals
        signals = RoleSignals(
            sent.may_change,
            sent.is_changing,
            sent.waited_ms / 1000,
            sent.fullness,
            role_from_wire(sent.own_role),
            sent.follows_load,
        )
    return LoadReport(
        message.open_choices,
        message.serves,
        message.sleeps,
        role_from_wire(message.role),
        message.free_tokens if message.HasField("free_tokens") else None,
        signals,
    )


def wish_to_wire(wish: RoleWish) -> scheduler_pb2.RoleWish:
    """Encode a tokenizer's wish."""
    return scheduler_pb2.RoleWish(role=role_to_wire(wish.role), reason=wish.reason)


def wish_from_wire(message: scheduler_pb2.RoleWish) -> RoleWish:
    """Decode a tokenizer's wish."""
    return RoleWish(role_from_wire(message.role), message.reason)


def schedule_request_to_wire(request: ScheduleRequest) -> scheduler_pb2.ScheduleRequest:
    """Encode a validated request for the scheduler."""
    message = scheduler_pb2.ScheduleRequest()
    write_schedule_request(request, message)
    return message


def write_schedule_request(request: ScheduleRequest, message: scheduler_pb2.ScheduleRequest) -> None:
    """Write a validated request for the scheduler into an empty message; see `pixels_to_wire`."""
    plain = scheduler_pb2.ScheduleRequest(
        request_id=request.request_id,
        view=view_to_wire(request.view),
        reply_to=reply_to_wire(request.reply_to),
        token_ids=request.token_ids.view(np.uint32).tolist(),
        second_text_start=request.second_text_start,
        prefill_group=request.prefill_group,
        prefill_group_name=request.prefill_group_name,
        prediction_token_ids=request.prediction_ids,
    )
    message.MergeFrom(plain)
    message.MergeFrom(options_to_wire(request.options, scheduler_pb2.ScheduleRequest))
    for image in request.images:
        added = message.images.add(digest=image.digest, offset=image.offset, length=image.length, grid=image.grid)
        if image.pixels is not None:
            pixels_to_wire(image.pixels, added)


def schedule_request_from_wire(message: scheduler_pb2.ScheduleRequest) -> ScheduleRequest:
    """Decode a request for the scheduler; an unset `n` means one choice.

    Raises:
        InvalidRequestError: view, reply_to, request id or prompt is missing, or a part of it is invalid.
    """
    request_id = request_id_from_wire(message.request_id)
    if not message.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return ScheduleRequest(
        request_id=request_id,
        view=view_from_wire(message.view),
        reply_to=reply_to_from_wire(message.reply_to),
        token_ids=np.array(message.token_ids, dtype=np.uint32).view(np.int32),
        images=tuple(map(_image_from_wire, message.images)),
        options=replace(options_from_wire(message), n=max(message.n, 1)),
        second_text_start=message.second_text_start if message.HasField("second_text_start") else None,
        prefill_group=message.prefill_group,
        prefill_group_name=message.prefill_group_name,
        prediction_ids=tuple(message.prediction_token_ids),
    )


def _image_from_wire(message: scheduler_pb2.PromptImage) -> RowImage:
    has_pixels = message.HasField("packed") or message.shape or message.pixels
    pixels = pixels_from_wire(message) if has_pixels else None
    return RowImage(message.digest, message.offset, message.length, tuple(message.grid), pixels)


def options_to_wire(options: RequestOptions, kind: type[Message]) -> Message:
    """Encode the options of a request as a message of type `kind`, whose other fields are unset."""
    return kind(
        sampling=sampling_to_wire(options.sampling),
        stop=stop_to_wire(options.stop),
        n=options.n,
        priority=options.priority,
        cache_mode=_CACHE_MODES[options.cache_mode],
        skip_special_tokens=options.skip_special_tokens,
        resume=resume_to_wire(options.resume),
        timeout_ms=options.timeout_ms,
        trace=trace_to_wire(options.trace),
        session=options.session,
        turn=_turn_to_wire(options.turn),
        max_context_tokens=options.max_context_tokens,
        pooling=pooling_to_wire(options.pooling),
        prompt_logprobs=prompt_logprobs_to_wire(options.prompt_logprobs),
        engine_failures=options.engine_failures,
        adapter=options.adapter,
        is_batch=options.is_batch,
        tenant_is_throttled=options.tenant_is_throttled,
        subject_is_throttled=options.subject_is_throttled,
    )


def options_from_wire(message: RequestMessage) -> RequestOptions:
    """Decode the options of a request. An unset cache mode is the default one; an unset `n` is 0.

    Raises:
        InvalidRequestError: an option is invalid, or contradicts another.
    """
    return RequestOptions(
        sampling=sampling_from_wire(message.sampling),
        stop=stop_from_wire(message.stop),
        n=message.n,
        priority=message.priority,
        cache_mode=_CACHE_MODES_BACK.get(message.cache_mode, CacheMode.DEFAULT),
        skip_special_tokens=message.skip_special_tokens,
        resume=resume_from_wire(message.resume) if message.HasField("resume") else None,
        timeout_ms=message.timeout_ms if message.HasField("timeout_ms") else None,
        trace=trace_from_wire(message.trace),
        session=check_name("session", message.session) if message.session else None,
        turn=_turn_from_wire(message),
        max_context_tokens=message.max_context_tokens if message.HasField("max_context_tokens") else None,
        pooling=pooling_from_wire(message.pooling),
        prompt_logprobs=prompt_logprobs_from_wire(message),
        engine_failures=message.engine_failures,
        adapter=check_name("adapter", message.adapter),
        is_batch=message.is_batch,
        tenant_is_throttled=message.tenant_is_throttled,
        subject_is_throttled=message.subject_is_throttled,
    )


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


def resume_to_wire(resume: Resume | None) -> common_pb2.Resume | None:
    """Encode the part of an interrupted choice that the client has, if there is one."""
    if resume is None:
        return None
    return common_pb2.Resume(token_ids=resume.token_ids, delivered_characters=resume.delivered_characters)


def resume_from_wire(message: common_pb2.Resume) -> Resume:
    """Decode the part of an interrupted choice that the client has; callers check HasField first."""
    return Resume(tuple(message.token_ids), message.delivered_characters)


def trace_to_wire(trace: TraceContext | None) -> common_pb2.TraceContext | None:
    """Encode a trace context."""
    return common_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate) if trace else None


def trace_from_wire(message: common_pb2.TraceContext) -> TraceContext | None:
    """Decode a trace context; None if the message is empty."""
    if not message.traceparent:
        return None
    return TraceContext(message.traceparent, message.tracestate if message.HasField("tracestate") else None)


def _turn_to_wire(turn: SessionTurn | None) -> sessions_pb2.SessionTurn | None:
    if turn is None:
        return None
    return sessions_pb2.SessionTurn(
        name=turn.name,
        after=turn.after,
        offset=turn.offset,
        drop_previous_output=turn.drop_previous_output,
        replace=turn.replace,
        conversation_token_ids=turn.conversation_ids,
        only_in_session=turn.only_in_session,
    )


def _turn_from_wire(message: RequestMessage) -> SessionTurn | None:
    if not message.HasField("turn"):
        return None
    turn = message.turn
    if not message.session or not turn.name:
        raise InvalidRequestError("a turn must have a name and a session", param="session_params")
    return SessionTurn(
        name=check_name("rid", turn.name),
        after=check_name("session_params.rid", turn.after) if turn.HasField("after") else None,
        offset=turn.offset or None,
        drop_previous_output=turn.drop_previous_output,
        replace=turn.replace,
        conversation_ids=tuple(turn.conversation_token_ids),
        only_in_session=turn.only_in_session,
    )


def grammar_to_wire(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """Encode a grammar, if there is one."""
    if grammar is None:
        return None
    scope = grammar.scope
    view = None if scope == NO_SCOPE else view_to_wire(View(Subject(scope.tenant, scope.subject), scope.salt))
    return common_pb2.Grammar(kind=_KINDS[grammar.kind], text=grammar.text, param=grammar.param, view=view)


def grammar_from_wire(message: common_pb2.Grammar) -> Grammar:
    """Decode a grammar; callers check HasField first.

    Raises:
        InvalidRequestError: its kind is unknown, its text is too long, or its view is incomplete.
    """
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequestError("The grammar's kind is not supported.", param=message.param)
    if len(message.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"A grammar must have at most {MAX_GRAMMAR_BYTES} bytes.", param=message.param)
    if not message.HasField("view"):
        return Grammar(kind, message.text, message.param)
    view = view_from_wire(message.view)
    return Grammar(kind, message.text, message.param, GrammarScope(view.tenant, view.subject.name, view.salt))
