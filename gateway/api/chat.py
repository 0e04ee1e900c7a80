"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError
from gateway.api.schema import documented
from gateway.identity.caller import identify
from gateway.render.chat import ChatStream, WholeChat
from gateway.render.parsed_chat import ParsedChatStream, WholeParsedChat
from gateway.schemas import refusals
from gateway.schemas.chat import ChatCompletionBody
from gateway.schemas.parse import parse

if TYPE_CHECKING:
    from gateway.api.context import Context
    from gateway.parsing.answers import Reading
    from gateway.render.shapes import ResponseHead, StreamRenderer, WholeRenderer


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
        reading = body.reading(card)
        generate = context.generate_request(request, head, asker, body, body.to_prompt(reading.prefix))
        if reading.needs_special_tokens and body.skip_special_tokens is None:
            generate = replace(generate, skip_special_tokens=False)
        if body.stream:
            return context.stream(asker, [generate], _stream(body, head, reading))
        return context.whole(asker, [generate], _whole(body, head, reading))

    return router


def _stream(body: ChatCompletionBody, head: ResponseHead, reading: Reading) -> StreamRenderer:
    logprobs, include_usage = bool(body.logprobs), body.wants_usage_in_stream
    if reading.is_plain:
        return ChatStream(head, logprobs=logprobs, include_usage=include_usage)
    return ParsedChatStream(head, reading, logprobs=logprobs, include_usage=include_usage)


def _whole(body: ChatCompletionBody, head: ResponseHead, reading: Reading) -> WholeRenderer:
    if reading.is_plain:
        return WholeChat(head, logprobs=bool(body.logprobs))
    return WholeParsedChat(head, reading, logprobs=bool(body.logprobs))
