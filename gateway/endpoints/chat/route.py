"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from gateway.backends import check_generates
from gateway.endpoints.answering import AnswerKind, AnswerPlan, add_continuation, answer
from gateway.endpoints.chat.grammar import chat_grammar
from gateway.endpoints.chat.render import ChatStream, ParsedChatStream, WholeChat, WholeParsedChat
from gateway.endpoints.chat.schema import ChatCompletionBody
from gateway.endpoints.routing import STREAMED
from gateway.endpoints.structure_fields import refuse_with_grammar
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from common.requests import GenerateRequest
    from gateway.backends import ChosenModel
    from gateway.delivery.deliveries import StreamRenderer, WholeRenderer
    from gateway.endpoints.context import Context
    from gateway.endpoints.opening import Json, Opening
    from gateway.endpoints.shapes import ResponseHead
    from gateway.identity.caller import Requester
    from gateway.parsing import ParsingRules


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post(CHATS.path, responses=STREAMED)
    async def create_chat_completion(
        request: Request, body: ChatCompletionBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Generate the next message of a conversation."""
        return await answer(context, request, caller, CHATS, body)

    add_continuation(router, context, CHATS)


async def look_up(context: Context, request: Request, caller: Caller, body: ChatCompletionBody) -> Json:
    """Return the images that the request does not contain itself."""
    if not (references := body.image_references()):
        return {}
    return await context.find_images(request, _requester(caller, body), references, body.model, body.lora_path)


async def plan(context: Context, opening: Opening, body: ChatCompletionBody, requester: Requester) -> AnswerPlan:
    """Plan the answer to a chat."""
    chosen = await require_chat(context, requester.caller, body.model, body.lora_path)
    head = opening.head(chosen.name, context.fingerprint)
    generate, reading = await chat_request(context, opening, head, requester, body, chosen)
    if body.stream:
        return AnswerPlan([generate], stream=_stream(body, head, reading), has_event_ids=body.wants_event_ids)
    return AnswerPlan([generate], whole=_whole(body, head, reading))


def _requester(caller: Caller, body: ChatCompletionBody) -> Requester:
    return identify(caller, body.user_names, body.cache_salt)


CHATS = AnswerKind(
    "/v1/chat/completions",
    ChatCompletionBody,
    new_id=lambda _body: f"chatcmpl-{uuid.uuid4().hex}",
    requester=_requester,
    plan=plan,
    has_stream_options=True,
    look_up=look_up,
)


async def require_chat(context: Context, caller: Caller, model: str | None, adapter: str | None = None) -> ChosenModel:
    """Return the model that a request of `caller` names, if it can chat; see `Context.choose`.

    Raises:
        ModelNotFoundError: no served model has this name.
        InvalidRequestError: it has no chat template.
    """
    chosen = await context.choose(caller, model, adapter)
    if not check_generates(chosen.card).has_chat_template:
        message = f"The model '{chosen.name}' has no chat template; use /v1/completions."
        raise InvalidRequestError(message, param="messages")
    return chosen


async def chat_request(
    context: Context,
    opening: Opening,
    head: ResponseHead,
    requester: Requester,
    body: ChatCompletionBody,
    chosen: ChosenModel,
) -> tuple[GenerateRequest, ParsingRules]:
    """Return the generation request of a chat, and the rules for parsing its output.

    Raises:
        InvalidRequestError: fields of the body contradict each other, or are not supported.
    """
    reading = body.reading(chosen.card)
    images = await context.read_images(chosen.card, body.image_references(), opening)
    prompt = body.to_prompt(reading.prefix, images)
    generate = context.generate_request(opening, head, requester, body, prompt, chosen)
    grammar = chat_grammar(body, reading)
    options = generate.options
    if grammar != options.sampling.grammar:
        refuse_with_grammar(grammar, allowed_token_ids=body.allowed_token_ids)
        options = replace(options, sampling=replace(options.sampling, grammar=grammar))
    if reading.needs_special_tokens and body.skip_special_tokens is None:
        options = replace(options, skip_special_tokens=False)
    return replace(generate, options=options), reading


def _stream(body: ChatCompletionBody, head: ResponseHead, reading: ParsingRules) -> StreamRenderer:
    logprobs, usage, ids = bool(body.logprobs), body.wants_usage_in_stream, bool(body.return_token_ids)
    if reading.is_plain:
        return ChatStream(head, logprobs=logprobs, include_usage=usage, token_ids=ids)
    return ParsedChatStream(head, reading, logprobs=logprobs, include_usage=usage, token_ids=ids)


def _whole(body: ChatCompletionBody, head: ResponseHead, reading: ParsingRules) -> WholeRenderer:
    logprobs, top, ids = bool(body.logprobs), body.prompt_logprobs, bool(body.return_token_ids)
    if reading.is_plain:
        return WholeChat(head, logprobs=logprobs, prompt_top=top, token_ids=ids)
    return WholeParsedChat(head, reading, logprobs=logprobs, prompt_top=top, token_ids=ids)
