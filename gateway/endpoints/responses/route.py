"""/v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response

from common.errors import InvalidRequestError, QueueFullError, UnavailableError
from gateway.answer_records.records import NO_CHUNKS, record_name
from gateway.delivery.deliveries import NO_EVENT, ReceivedEvent
from gateway.delivery.recorded_answer import CANCELLED_END
from gateway.endpoints.answering import (
    AnswerKind,
    AnswerPlan,
    add_continuation,
    adopt,
    answer,
    find_opening,
    join,
    last_event,
)
from gateway.endpoints.chat.route import chat_request, require_chat
from gateway.endpoints.responses.render import ResponseDraft, ResponseStream, WholeResponse
from gateway.endpoints.responses.schema import (
    FORMAT,
    ResponseBody,
    from_stored,
    images_of,
    to_messages,
    to_stored,
)
from gateway.endpoints.routing import STREAMED
from gateway.endpoints.schema import parse
from gateway.identity.caller import Caller, identify
from gateway.server.errors import HttpError
from gateway.stored_responses.store import ResponseOwner, StoredResponse

if TYPE_CHECKING:
    from common.requests import GenerateRequest
    from gateway.endpoints.context import Context
    from gateway.endpoints.opening import Opening
    from gateway.identity.caller import Requester

Json: TypeAlias = dict[str, Any]  # Any: free JSON

MAX_ID_CHARACTERS = 256
# How often a gateway looks for responses in the background whose gateways have died.
ADOPTION_INTERVAL_S = 1.0


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post(RESPONSES.path, responses=STREAMED)
    async def create_response(
        request: Request, body: ResponseBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Generate the next output of a conversation, optionally of a stored one."""
        return await answer(context, request, caller, RESPONSES, body)

    add_continuation(router, context, RESPONSES)
    _add_retrieval(router, context)


def _add_retrieval(router: APIRouter, context: Context) -> None:
    """Add the routes of responses that exist already."""

    @router.get("/v1/responses/{response_id}", responses=STREAMED)
    async def get_response(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: int = Query(NO_EVENT.number, ge=NO_EVENT.number),
        caller: Caller = Depends(context.caller),
    ) -> Response:
        """Return a stored response or one in the background, or its events after the number `starting_after`."""
        async with context.charged(request, identify(caller).subject):
            if stream:
                received = last_event(request)
                return await join(
                    context,
                    RESPONSES,
                    _name(caller, response_id),
                    ReceivedEvent(starting_after) if received is None else received[1],
                    streams=True,
                )
            found = await _current(context, caller, response_id)
        if found is None:
            raise _unknown(response_id)
        return _json(found)

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        request: Request, response_id: str, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Return the input items of a stored response."""
        stored = await _stored(context, request, caller, response_id)
        ids = [item.get("id") for item in stored.input]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return _json({"object": "list", "data": stored.input, "has_more": False, **ends})

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """End a response in the background; return it."""
        await context.charge_for_ending(request, identify(caller).subject)
        await _cancel(context, caller, response_id)
        found = await _current(context, caller, response_id)
        if found is None:
            raise _unknown(response_id)
        if not found["background"]:
            raise HttpError(400, "Only responses that were created with 'background' can be cancelled.")
        return _json(found)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Delete a response and its record; one in the background is cancelled."""
        await context.charge_for_ending(request, identify(caller).subject)
        await _cancel(context, caller, response_id)
        if not await context.stored.delete(_holder(caller), response_id):
            raise _unknown(response_id)
        await context.answers.records.drop(_name(caller, response_id))
        return _json({"id": response_id, "object": "response", "deleted": True})


async def adopt_responses(context: Context) -> None:
    """Continue responses in the background whose gateways have died, until cancelled."""
    adopting: set[str] = set()

    async def try_to_adopt(name: str) -> None:
        try:
            await adopt(context, RESPONSES, name)
        finally:
            adopting.discard(name)

    while True:
        await asyncio.sleep(ADOPTION_INTERVAL_S)
        if context.generations.draining:
            continue
        with contextlib.suppress(UnavailableError):
            for name in set(await context.answers.records.orphans()) - adopting:
                adopting.add(name)
                context.answers.spawn(try_to_adopt(name))


async def look_up(context: Context, request: Request, caller: Caller, body: ResponseBody) -> Json:
    """Return the conversation before this response."""
    messages = body.new_messages()
    if body.is_stored:
        # Checked before generation, because the client relies on the response being stored.
        context.stored.check()
    earlier = await _earlier(context, _holder(caller, body), body.previous_response_id)
    references = images_of([*from_stored(earlier), *messages])
    if not references:
        return {"earlier": earlier}
    requester = RESPONSES.requester(caller, body)
    return {"earlier": earlier, **await context.find_images(request, requester, references, body.model)}


async def plan(context: Context, opening: Opening, body: ResponseBody, requester: Requester) -> AnswerPlan:
    """Plan a response."""
    messages = _conversation(opening, body)
    chat = body.to_chat(messages)
    chosen = await require_chat(context, requester.caller, body.model)
    head = opening.head(chosen.name, context.fingerprint)
    generate, reading = await chat_request(context, opening, head, requester, chat, chosen)
    requests = [_with_own_names(generate)]
    finished: list[Json] = []

    async def keep() -> None:
        for response in finished if body.is_stored else ():
            holder = _holder(opening.caller, body)
            await context.stored.put(holder, requester.subject, _to_store(opening, body, messages, response))

    async def current() -> Response:
        return _json(await _current(context, opening.caller, opening.id) or draft.shape("queued", []))

    fields = _fields(body, head.created, chosen.name)
    draft = ResponseDraft(opening.id, fields, body.wants_logprobs, finished.append, bool(body.background))
    if body.background:
        receipt = None if body.stream else current
        stream = ResponseStream(draft, reading)
        return AnswerPlan(requests, stream=stream, before_end=keep, in_background=True, receipt=receipt)
    if body.stream:
        stream = ResponseStream(draft, reading)
        return AnswerPlan(requests, stream=stream, before_end=keep, has_event_ids=body.is_stored)
    return AnswerPlan(requests, whole=WholeResponse(draft, reading), before_end=keep)


RESPONSES = AnswerKind(
    "/v1/responses",
    ResponseBody,
    new_id=lambda _body: f"resp_{secrets.token_hex(24)}",
    requester=lambda caller, body: identify(caller, body.user_names, body.cache_salt),
    plan=plan,
    look_up=look_up,
)


def _name(caller: Caller, response_id: str) -> str:
    return record_name(caller.tenant, caller.subject, response_id)


async def _current(context: Context, caller: Caller, response_id: str) -> Json | None:
    """Return a response that is stored, or that is generated in the background."""
    if len(response_id) > MAX_ID_CHARACTERS:
        return None
    stored = await context.stored.find(_holder(caller), response_id)
    if stored is not None:
        return dict(stored.response)
    name = _name(caller, response_id)
    opening = await find_opening(context, RESPONSES, name)
    reading = await context.answers.records.read(name, NO_CHUNKS)
    if opening is None or reading is None or not opening.body.get("background"):
        return None
    return await _unfinished(context, opening, "in_progress" if reading.written else "queued")


async def _cancel(context: Context, caller: Caller, response_id: str) -> None:
    """End a response in the background, if it is open."""
    name = _name(caller, response_id)
    opening = await find_opening(context, RESPONSES, name)
    if opening is None or not opening.body.get("background"):
        return
    if await context.answers.records.finish(name, None, CANCELLED_END):
        body = parse(ResponseBody, opening.body)
        subject = RESPONSES.requester(opening.caller, body).subject
        response = await _unfinished(context, opening, "cancelled")
        stored = _to_store(opening, body, _conversation(opening, body), response)
        await context.stored.put(_holder(opening.caller, body), subject, stored)
        # Its gateway also notices with its next token.
        with contextlib.suppress(UnavailableError, QueueFullError):
            await context.aborts.abort(response_id, replace(caller, is_admin=False))


async def _unfinished(context: Context, opening: Opening, status: str) -> Json:
    """Return a response in the background without output."""
    body = parse(ResponseBody, opening.body)
    chosen = await require_chat(context, opening.caller, body.model)
    draft = ResponseDraft(
        opening.id, _fields(body, opening.created, chosen.name), body.wants_logprobs, lambda _json: None
    )
    return draft.shape(status, [])


def _with_own_names(generate: GenerateRequest) -> GenerateRequest:
    """Replace the chat's name of the output format by this API's name, which errors use."""
    options = generate.options
    grammar = options.sampling.grammar
    if grammar is None or not grammar.param.startswith("response_format"):
        return generate
    sampling = replace(options.sampling, grammar=replace(grammar, param=FORMAT))
    return replace(generate, options=replace(options, sampling=sampling))


def _holder(caller: Caller, body: ResponseBody | None = None) -> ResponseOwner:
    """Return the owner of a response. Requests that retrieve it name no user, so it belongs to the credential."""
    names = (body.user_id, body.user, body.safety_identifier) if body else ()
    return ResponseOwner(caller.tenant, caller.subject, next(filter(None, names), None))


async def _earlier(context: Context, holder: ResponseOwner, previous_id: str | None) -> list[Json]:
    if previous_id is None:
        return []
    stored = await context.stored.find(holder, previous_id)
    if stored is None:
        message = f"Previous response with id '{previous_id}' not found."
        raise InvalidRequestError(message, param="previous_response_id")
    return list(stored.messages)


async def _stored(context: Context, request: Request, caller: Caller, response_id: str) -> StoredResponse:
    is_sane = len(response_id) <= MAX_ID_CHARACTERS
    async with context.charged(request, identify(caller).subject):
        stored = await context.stored.find(_holder(caller), response_id) if is_sane else None
    if stored is None:
        raise _unknown(response_id)
    return stored


def _unknown(response_id: str) -> HttpError:
    return HttpError(404, f"Response with id '{response_id[:MAX_ID_CHARACTERS]}' not found.")


def _conversation(opening: Opening, body: ResponseBody) -> list[Json]:
    """Return the messages of earlier responses and those of this request."""
    return [*from_stored(opening.found["earlier"]), *body.new_messages()]


def _to_store(opening: Opening, body: ResponseBody, messages: list[Json], response: Json) -> StoredResponse:
    given = [{"id": f"msg_{secrets.token_hex(12)}", **item} for item in body.input]
    conversation = to_stored(messages, opening.found.get("images", {}))
    return StoredResponse(response, [*conversation, *to_messages(response["output"])], given)


def _fields(body: ResponseBody, created: int, model: str) -> Json:
    """Return the fields that a response copies from its request."""
    return {
        "created_at": created,
        "model": model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": bool(body.background),
        "store": body.is_stored,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "metadata": body.metadata or {},
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
