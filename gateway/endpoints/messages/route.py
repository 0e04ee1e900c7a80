"""/v1/messages, for clients of Anthropic's API."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Request, Response

from gateway.endpoints import refusals
from gateway.endpoints.chat.route import chat_request, require_chat
from gateway.endpoints.messages.render import MessageStream, WholeMessage
from gateway.endpoints.messages.schema import MessagesBody
from gateway.endpoints.openapi import documented
from gateway.endpoints.plain_route import PlainRoute
from gateway.endpoints.schema import parse
from gateway.identity.caller import identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=PlainRoute)

    @router.post("/v1/messages", openapi_extra=documented(MessagesBody))
    async def create_message(request: Request) -> Response:
        """Generate the next message of a conversation."""
        caller = await context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.MESSAGES)
        body = parse(MessagesBody, raw)
        chat = body.to_chat()
        # Coding agents put a session id there, so it names a person only if the credential vouches for its users.
        requester = identify(caller, body.user_names if caller.vouches else ())
        card = await require_chat(context, chat.model)
        head = context.head(f"msg_{uuid.uuid4().hex}", card.name)
        generate, reading = chat_request(context, request, head, requester, chat, card)
        if chat.stream:
            return context.stream(requester, [generate], MessageStream(head, reading))
        return context.whole(requester, [generate], WholeMessage(head, reading))

    @router.post("/v1/messages/count_tokens", openapi_extra=documented(MessagesBody))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation; `max_tokens` is not needed here."""
        caller = await context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.MESSAGES)
        body = parse(MessagesBody, {**raw, "max_tokens": 1})
        chat = body.to_chat()
        subject = identify(caller, body.user_names if caller.vouches else ()).subject
        card = await require_chat(context, chat.model)
        backend = await context.models.find(card.name)
        encoded = await context.render_chat(request, subject, backend, chat.to_prompt(chat.reading(card).prefix))
        return Response(orjson.dumps({"input_tokens": len(encoded.ids)}), media_type="application/json")

    return router
