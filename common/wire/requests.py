"""Requests on their way to the scheduler, from and to protobuf."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import ReplyTo, RequestId, ScheduleRequest, SubscriberId
from common.wire.identity import view_from_wire, view_to_wire
from common.wire.options import options_from_wire, options_to_wire
from protos.gen.pando.v1 import common_pb2, scheduler_pb2


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


def schedule_request_to_wire(request: ScheduleRequest) -> scheduler_pb2.ScheduleRequest:
    """Encode a validated request for the scheduler."""
    message = scheduler_pb2.ScheduleRequest(
        request_id=request.request_id,
        view=view_to_wire(request.view),
        reply_to=reply_to_wire(request.reply_to),
        token_ids=request.token_ids.tolist(),
    )
    message.MergeFrom(options_to_wire(request.options, scheduler_pb2.ScheduleRequest))
    return message


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
        token_ids=np.array(message.token_ids, dtype=np.int32),
        options=replace(options_from_wire(message), n=max(message.n, 1)),
    )
