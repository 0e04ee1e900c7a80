"""/v1/messages, for clients of Anthropic's API."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway.endpoints.answering import AnswerKind, AnswerPlan, add_continuation, answer
from gateway.endpoints.chat.route import chat_request, require_chat
from gateway.endpoints.messages.render import MessageStream, WholeMessage
from gateway.endpoints.messages.schema import CountTokensBody, MessagesBody
from gateway.endpoints.routing import STREAMED
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context
    from gateway.endpoints.opening import Json, Opening
    from gateway.identity.caller import Requester


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post(MESSAGES.path, responses=STREAMED)
    async def create_message(
        request: Request, body: MessagesBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Generate the next message of a conversation."""
        return await answer(context, request, caller, MESSAGES, body)

    add_continuation(router, context, MESSAGES)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(
        request: Request, body: CountTokensBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Count the tokens of a conversation."""
        chat = body.to_chat()
        requester = _requester(caller, body)
        card = (await require_chat(context, caller, chat.model)).card
        backend = await context.models.find(card.name)
        images = await context.images_of(request, requester, card, chat.image_references())
        prompt = chat.to_prompt(chat.reading(card).prefix, images)
        encoded = await context.render_chat(request, requester.subject, backend, prompt)
        return Response(orjson.dumps({"input_tokens": len(encoded.ids)}), media_type="application/json")


async def look_up(context: Context, request: Request, caller: Caller, body: MessagesBody) -> Json:
    """Return the images that the request does not contain itself."""
    if not (references := body.image_references()):
        return {}
    return await context.find_images(request, _requester(caller, body), references, body.model)


async def plan(context: Context, opening: Opening, body: MessagesBody, requester: Requester) -> AnswerPlan:
    """Plan the answer to a conversation."""
    chat = body.to_chat()
    chosen = await require_chat(context, requester.caller, chat.model, chat.lora_path)
    head = opening.head(chosen.name, context.fingerprint)
    generate, reading = await chat_request(context, opening, head, requester, chat, chosen)
    if chat.stream:
        return AnswerPlan([generate], stream=MessageStream(head, reading))
    return AnswerPlan([generate], whole=WholeMessage(head, reading))


def _requester(caller: Caller, body: MessagesBody) -> Requester:
    # Coding agents put a session id there, so it names a person only if the credential vouches for its users.
    return identify(caller, body.user_names if caller.vouches else ())


MESSAGES = AnswerKind(
    "/v1/messages",
    MessagesBody,
    new_id=lambda _body: f"msg_{uuid.uuid4().hex}",
    requester=_requester,
    plan=plan,
    look_up=look_up,
)
