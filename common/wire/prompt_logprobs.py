"""Log probabilities of prompts, to and from protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequestError
from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
from protos.gen.pando.v1 import common_pb2

if TYPE_CHECKING:
    from protos.gen.pando.v1 import scheduler_pb2, tokenizer_pb2, worker_pb2


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
