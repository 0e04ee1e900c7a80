"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError
from gateway.api.schema import documented
from gateway.identity.caller import identify
from gateway.render.chat import ChatStream, WholeChat
from gateway.schemas import refusals
from gateway.schemas.chat import ChatCompletionBody
from gateway.schemas.parse import parse

if TYPE_CHECKING:
    from gateway.api.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=documented(ChatCompletionBody))
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        caller = await context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.CHAT)
        body = parse(ChatCompletionBody, raw)
        asker = identify(caller, body.user_names)
        card = await context.served.require(body.model)
        if not card.has_chat_template:
            message = f"The model '{card.name}' has no chat template; use /v1/completions."
            raise InvalidRequestError(message, param="messages")
        head = context.head(f"chatcmpl-{uuid.uuid4().hex}", card.name)
        generate = context.generate_request(request, head, asker, body, body.to_prompt())
        logprobs = bool(body.logprobs)
        if body.stream:
            chunks = ChatStream(head, logprobs=logprobs, include_usage=body.wants_usage_in_stream)
            return context.stream(asker, [generate], chunks)
        return context.whole(asker, [generate], WholeChat(head, logprobs=logprobs))

    return router
