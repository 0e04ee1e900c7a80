"""Conversion between this service's protobuf messages and the values of `messages.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.types import RequestId, SubscriberId
from common.wire.answers import (
    cached_parts_from_wire,
    cached_parts_to_wire,
    finish_from_wire,
    finish_to_wire,
    logprob_from_wire,
    span_from_wire,
)
from common.wire.requests import resume_from_wire, trace_from_wire
from protos.gen.pando.v1 import detokenizer_pb2
from services.detokenizer.messages import ChoiceSpec, PromptLogprobsPart, Push

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import Delta, LogprobText, PromptLogprobsText, TokenText
    from services.detokenizer.messages import Answers


def push_from_wire(message: detokenizer_pb2.PushRequest) -> Push:
    """Decode the results of one step.

    Raises:
        InvalidRequestError: the columns have inconsistent lengths.
    """
    tokens = len(message.token_ids)
    if len(message.handles) != tokens or any(entry.index >= tokens for entry in message.logprobs):
        raise InvalidRequestError("handles, token_ids and logprobs are inconsistent", param="handles")
    if len(message.origins) not in (0, tokens):
        raise InvalidRequestError("token_ids and origins differ in length", param="origins")
    if any(len(entry.logprob.top_token_ids) != len(entry.logprob.top_logprobs) for entry in message.logprobs):
        raise InvalidRequestError("top_token_ids and top_logprobs differ in length", param="logprobs")
    return Push(
        opens=[_spec_from_wire(opened) for opened in message.opens],
        handles=list(message.handles),
        token_ids=list(message.token_ids),
        logprobs={entry.index: logprob_from_wire(entry.logprob) for entry in message.logprobs},
        starts={entry.handle: entry.cached_tokens for entry in message.starts},
        finishes={entry.handle: finish_from_wire(entry.finish) for entry in message.finishes},
        prompt_logprobs=[_part_from_wire(entry) for entry in message.prompt_logprobs],
        weight_version=message.weight_version,
        cached={entry.handle: cached_parts_from_wire(entry.cached) for entry in message.starts if entry.cached},
        origins=message.origins,
    )


def deltas_to_wire(deltas: Sequence[Delta]) -> detokenizer_pb2.SubscribeResponse:
    """Encode deltas for a subscriber."""
    return detokenizer_pb2.SubscribeResponse(deltas=[_delta_to_wire(delta) for delta in deltas])


def answers_to_wire(answers: Answers) -> detokenizer_pb2.PushResponse:
    """Encode responses to a scheduler."""
    hits = [
        detokenizer_pb2.StopHit(handle=hit.handle, completion_tokens=hit.completion_tokens) for hit in answers.stop_hits
    ]
    return detokenizer_pb2.PushResponse(stop_hits=hits, gone_handles=answers.gone_handles)


def _spec_from_wire(message: detokenizer_pb2.ChoiceOpen) -> ChoiceSpec:
    return ChoiceSpec(
        handle=message.handle,
        request_id=RequestId(message.request_id),
        choice_index=message.choice_index,
        subscriber_id=SubscriberId(message.subscriber_id),
        stop_strings=tuple(message.stop_strings),
        include_stop_text=message.include_stop_text,
        skip_special_tokens=message.skip_special_tokens,
        min_tokens=message.min_tokens,
        prompt_tokens=message.prompt_tokens,
        resume=resume_from_wire(message.resume) if message.HasField("resume") else None,
        stop_patterns=tuple(message.stop_patterns),
        trace=trace_from_wire(message.trace),
    )


def _part_from_wire(message: detokenizer_pb2.ChoicePromptLogprobs) -> PromptLogprobsPart:
    lead = message.lead_token_id if message.HasField("lead_token_id") else None
    return PromptLogprobsPart(message.handle, span_from_wire(message.span), lead, message.is_last)


def _delta_to_wire(delta: Delta) -> detokenizer_pb2.Delta:
    message = detokenizer_pb2.Delta(
        request_id=delta.request_id,
        choice_index=delta.choice_index,
        first_token_index=delta.first_token_index,
        token_ids=delta.token_ids,
        text=delta.text,
    )
    # The other fields are rare; a delta without them costs half as much.
    if delta.logprobs:
        message.logprobs.extend(_logprob_to_wire(logprob) for logprob in delta.logprobs)
    if delta.prompt_usage is not None:
        message.prompt_usage.prompt_tokens = delta.prompt_usage.prompt_tokens
        message.prompt_usage.cached_tokens = delta.prompt_usage.cached_tokens
        message.prompt_usage.cached.extend(cached_parts_to_wire(delta.prompt_usage.cached))
        message.prompt_usage.SetInParent()
    if delta.finish is not None:
        message.finish.CopyFrom(finish_to_wire(delta.finish))
    if delta.weight_version:
        message.weight_version = delta.weight_version
    if delta.forced_tokens:
        message.forced_tokens = delta.forced_tokens
    if delta.drafted_tokens:
        message.drafted_tokens = delta.drafted_tokens
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(_prompt_logprobs_to_wire(delta.prompt_logprobs))
    return message


def _logprob_to_wire(logprob: LogprobText) -> detokenizer_pb2.LogprobText:
    return detokenizer_pb2.LogprobText(
        token=_token_to_wire(logprob.token),
        top=[_token_to_wire(token) for token in logprob.top],
        asked_logprobs=logprob.asked,
        rank=logprob.rank,
    )


def _prompt_logprobs_to_wire(part: PromptLogprobsText) -> detokenizer_pb2.PromptLogprobsText:
    return detokenizer_pb2.PromptLogprobsText(
        first_position=part.first,
        entries=[_logprob_to_wire(entry) for entry in part.entries],
        lead=None if part.lead is None else _token_to_wire(part.lead),
        is_last=part.is_last,
    )


def _token_to_wire(token: TokenText) -> detokenizer_pb2.TokenText:
    return detokenizer_pb2.TokenText(token_id=token.token_id, logprob=token.logprob, text=token.text)
