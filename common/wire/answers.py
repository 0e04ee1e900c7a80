"""Admissions, finishes, errors and log probabilities, of prompts too, from and to protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.deltas import CACHE_LEVELS, CACHE_TIERS, CachedPart
from common.errors import InvalidRequestError
from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
from common.types import Admission, ErrorCode, Finish, FinishReason, RequestFailure, RequestId, TokenLogprob
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from protos.gen.pando.v1 import scheduler_pb2, tokenizer_pb2, worker_pb2

# 4 MB, unless a single admission has more.
MAX_MESSAGE_IDS = 1_000_000

_FINISH_REASONS = {reason: common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_REASONS_BACK = {wire: reason for reason, wire in _FINISH_REASONS.items()}
_ERROR_CODES = {code: common_pb2.ErrorCode.Value(f"ERROR_CODE_{code.name}") for code in ErrorCode}
_ERROR_CODES_BACK = {wire: code for code, wire in _ERROR_CODES.items()}


def failure_to_wire(failure: RequestFailure) -> common_pb2.RequestError:
    """Encode the error that ended a request."""
    return common_pb2.RequestError(
        code=_ERROR_CODES[failure.code],
        message=failure.message,
        param=failure.param,
        retryable=failure.retryable,
        retry_after_ms=failure.retry_after_ms,
        engine_failures=failure.engine_failures,
    )


def failure_from_wire(message: common_pb2.RequestError) -> RequestFailure:
    """Decode the error that ended a request; unknown codes, of a newer peer, become INTERNAL."""
    return RequestFailure(
        code=_ERROR_CODES_BACK.get(message.code, ErrorCode.INTERNAL),
        message=message.message,
        param=message.param if message.HasField("param") else None,
        retryable=message.retryable,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        engine_failures=message.engine_failures,
    )


def finish_reason_to_wire(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """Encode a finish reason."""
    return _FINISH_REASONS[reason]


def finish_reason_from_wire(value: common_pb2.FinishReason.ValueType) -> FinishReason:
    """Decode a finish reason."""
    return _FINISH_REASONS_BACK[value]


def cached_parts_to_wire(parts: Iterable[CachedPart]) -> list[detokenizer_pb2.CachedPart]:
    """Encode the cached parts of a prompt."""
    return [detokenizer_pb2.CachedPart(tier=part.tier, level=part.level, tokens=part.tokens) for part in parts]


def cached_parts_from_wire(messages: Iterable[detokenizer_pb2.CachedPart]) -> tuple[CachedPart, ...]:
    """Decode the cached parts of a prompt; those of tiers and levels that a newer peer knows are left out."""
    return tuple(
        CachedPart(message.tier, message.level, message.tokens)
        for message in messages
        if message.tier in CACHE_TIERS and message.level in CACHE_LEVELS
    )


def finish_to_wire(finish: Finish) -> common_pb2.Finish:
    """Encode the end of a choice."""
    message = common_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason],
        accepted_prediction_tokens=finish.accepted_prediction_tokens,
        rejected_prediction_tokens=finish.rejected_prediction_tokens,
    )
    if finish.matched_token_id is not None:
        message.matched_token_id = finish.matched_token_id
    if finish.matched_text is not None:
        message.matched_text = finish.matched_text
    if finish.error is not None:
        message.error.CopyFrom(failure_to_wire(finish.error))
    if finish.embedding is not None:
        message.embedding = finish.embedding
    return message


def finish_from_wire(message: common_pb2.Finish) -> Finish:
    """Decode the end of a choice."""
    matched = message.WhichOneof("matched")
    return Finish(
        reason=_FINISH_REASONS_BACK[message.reason],
        matched_token_id=message.matched_token_id if matched == "matched_token_id" else None,
        matched_text=message.matched_text if matched == "matched_text" else None,
        error=failure_from_wire(message.error) if message.HasField("error") else None,
        embedding=message.embedding if message.HasField("embedding") else None,
        accepted_prediction_tokens=message.accepted_prediction_tokens,
        rejected_prediction_tokens=message.rejected_prediction_tokens,
    )


def logprob_to_wire(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """Encode a token's log probabilities."""
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=logprob.top_token_ids,
        top_logprobs=logprob.top_logprobs,
        asked_logprobs=logprob.asked,
    )


def logprob_from_wire(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Decode a token's log probabilities."""
    asked = tuple(message.asked_logprobs)
    return TokenLogprob(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs), asked)


def admission_to_wire(admission: Admission) -> common_pb2.Admission:
    """Encode an admission answer."""
    return common_pb2.Admission(
        request_id=admission.request_id,
        rejected=failure_to_wire(admission.rejected) if admission.rejected else None,
        prompt_tokens=admission.prompt_tokens,
        prompt_token_ids=admission.prompt_ids,
        conversation_token_ids=admission.conversation_ids,
        lacks_images=admission.lacks_images,
        keeps_images=admission.keeps_images,
        lacks_session=admission.lacks_session,
    )


def admission_from_wire(message: common_pb2.Admission) -> Admission:
    """Decode an admission answer."""
    rejected = failure_from_wire(message.rejected) if message.HasField("rejected") else None
    return Admission(
        RequestId(message.request_id),
        message.prompt_tokens,
        rejected,
        tuple(message.prompt_token_ids),
        tuple(message.conversation_token_ids),
        message.lacks_images,
        message.keeps_images,
        message.lacks_session,
    )


def divided(admissions: Iterable[Admission]) -> Iterator[Sequence[Admission]]:
    """Divide admissions among messages of about MAX_MESSAGE_IDS token ids, well below gRPC's limit; at least one."""
    part: list[Admission] = []
    ids = 0
    for admission in admissions:
        more = len(admission.prompt_ids) + len(admission.conversation_ids)
        if part and ids + more > MAX_MESSAGE_IDS:
            yield part
            part, ids = [], 0
        part.append(admission)
        ids += more
    yield part


def prompt_logprobs_to_wire(wanted: PromptLogprobs | None) -> common_pb2.PromptLogprobs | None:
    """Encode a request for prompt log probabilities, if there is one."""
    if wanted is None:
        return None
    return common_pb2.PromptLogprobs(start_token=wanted.start, top=wanted.top, token_ids=wanted.token_ids)


def prompt_logprobs_from_wire(
    message: scheduler_pb2.ScheduleRequest | tokenizer_pb2.GenerateRequest | worker_pb2.RowOpen,
) -> PromptLogprobs | None:
    """Decode a request for prompt log probabilities, if the message has one."""
    if not message.HasField("prompt_logprobs"):
        return None
    wanted = message.prompt_logprobs
    return PromptLogprobs(wanted.start_token, wanted.top, tuple(wanted.token_ids))


def span_to_wire(span: PromptLogprobSpan) -> common_pb2.PromptLogprobSpan:
    """Encode log probabilities of consecutive prompt tokens."""
    return common_pb2.PromptLogprobSpan(
        first_position=span.first,
        token_ids=span.token_ids.tolist(),
        logprobs=span.logprobs.tolist(),
        ranks=span.ranks.tolist(),
        top_token_ids=span.top_ids.ravel().tolist(),
        top_logprobs=span.top_logprobs.ravel().tolist(),
        asked_logprobs=span.asked.ravel().tolist(),
    )


def span_from_wire(message: common_pb2.PromptLogprobSpan) -> PromptLogprobSpan:
    """Decode log probabilities of consecutive prompt tokens.

    Raises:
        InvalidRequestError: the columns have inconsistent lengths.
    """
    tokens = len(message.token_ids)
    flat = (message.top_token_ids, message.top_logprobs, message.asked_logprobs)
    if (
        {len(message.logprobs), len(message.ranks)} != {tokens}
        or len(message.top_token_ids) != len(message.top_logprobs)
        or any(len(column) % max(tokens, 1) for column in flat)
    ):
        raise InvalidRequestError("the columns of prompt log probabilities have inconsistent lengths", param="span")
    shape = (tokens, -1) if tokens else (0, 0)
    return PromptLogprobSpan(
        message.first_position,
        np.array(message.token_ids, np.int32),
        np.array(message.logprobs, np.float32),
        np.array(message.ranks, np.int32),
        np.array(message.top_token_ids, np.int32).reshape(shape),
        np.array(message.top_logprobs, np.float32).reshape(shape),
        np.array(message.asked_logprobs, np.float32).reshape(shape),
    )
