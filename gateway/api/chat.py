"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError
from common.requests import GenerateRequest
from common.types import CacheMode, RequestId
from gateway.api.schema import documented
from gateway.identity import principal_of
from gateway.render.chat import ChatStream, WholeChat
from gateway.schemas import refusals
from gateway.schemas.chat import ChatCompletionBody
from gateway.schemas.parse import parse
from gateway.trace import trace_of

if TYPE_CHECKING:
    from gateway.api.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=documented(ChatCompletionBody))
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        caller = context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.CHAT)
        body = parse(ChatCompletionBody, raw)
        principal = principal_of(caller, body.user_names)
        card = await context.served.require(body.model)
        if not card.has_chat_template:
            message = f"The model '{card.name}' has no chat template; use /v1/completions."
            raise InvalidRequestError(message, param="messages")
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        generate = GenerateRequest(
            request_id=RequestId(response_id),
            principal=principal,
            model=card.name,
            prompt=body.to_prompt(),
            sampling=body.sampling(body.logprobs_wanted),
            stop=body.stop_conditions(body.token_limit),
            n=body.choices,
            priority=body.priority or 0,
            cache_mode=body.cache_mode or CacheMode.DEFAULT,
            skip_special_tokens=body.skip_special_tokens is not False,
            timeout_ms=context.limits.request_timeout_ms,
            trace=trace_of(request.headers),
        )
        head = context.head(response_id, card.name)
        logprobs = bool(body.logprobs)
        if body.stream:
            chunks = ChatStream(head, logprobs=logprobs, include_usage=body.wants_usage_in_stream)
            return context.stream([generate], chunks)
        return context.whole([generate], WholeChat(head, logprobs=logprobs))

    return router
