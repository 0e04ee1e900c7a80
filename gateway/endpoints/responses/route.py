"""/v1/responses."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from gateway.endpoints.chat.route import chat_request, require_chat
from gateway.endpoints.responses.render import ResponseDraft, ResponseStream, WholeResponse
from gateway.endpoints.responses.schema import FORMAT, ResponseBody, to_messages
from gateway.endpoints.routing import STREAMED
from gateway.identity.caller import Caller, identify
from gateway.server.errors import HttpError
from gateway.stored_responses.store import ResponseOwner, StoredResponse

if TYPE_CHECKING:
    from typing import Any

    from common.requests import GenerateRequest
    from gateway.endpoints.context import Context

MAX_ID_CHARACTERS = 256


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/responses", responses=STREAMED)
    async def create_response(
        request: Request, body: ResponseBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Generate the next output of a conversation, optionally of a stored one."""
        messages = body.new_messages()
        if body.store is not False:
            # Checked before generation, because the client relies on the response being stored.
            context.stored.check()
        holder = _holder(caller, body)
        messages = [*await _earlier(context, holder, body.previous_response_id), *messages]
        chat = body.to_chat(messages)
        requester = identify(caller, chat.user_names, chat.cache_salt)
        card = await require_chat(context, body.model)
        response_id = f"resp_{secrets.token_hex(24)}"
        head = context.head(response_id, card.name)
        generate, reading = chat_request(context, request, head, requester, chat, card)
        generate = _with_own_names(generate)
        finished: list[dict[str, Any]] = []  # Any: free JSON

        async def keep() -> None:
            for response in finished if body.store is not False else ():
                await context.stored.put(holder, requester.subject, _to_store(body, messages, response))

        draft = ResponseDraft(response_id, _fields(body, head.created, card.name), body.wants_logprobs, finished.append)
        if body.stream:
            return context.stream(requester, [generate], ResponseStream(draft, reading), keep)
        return context.whole(requester, [generate], WholeResponse(draft, reading), keep)

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return a stored response."""
        stored = await _stored(context, request, caller, response_id)
        return _json(stored.response)

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        request: Request, response_id: str, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Return the input items of a stored response."""
        stored = await _stored(context, request, caller, response_id)
        ids = [item.get("id") for item in stored.input]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return _json({"object": "list", "data": stored.input, "has_more": False, **ends})

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Delete a stored response."""
        await context.charge_for_ending(request, identify(caller).subject)
        holder = _holder(caller)
        if not await context.stored.delete(holder, response_id):
            raise _unknown(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})


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


async def _earlier(
    context: Context, holder: ResponseOwner, previous_id: str | None
) -> list[dict[str, Any]]:  # Any: free JSON
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


def _to_store(
    body: ResponseBody,
    messages: list[dict[str, Any]],  # Any: free JSON
    response: dict[str, Any],  # Any: free JSON
) -> StoredResponse:
    given = [{"id": f"msg_{secrets.token_hex(12)}", **item} for item in body.input]
    return StoredResponse(response, [*messages, *to_messages(response["output"])], given)


def _fields(body: ResponseBody, created: int, model: str) -> dict[str, Any]:  # Any: free JSON
    """Return the fields that a response copies from its request."""
    return {
        "created_at": created,
        "completed_at": int(time.time()),
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
        "background": False,
        "store": body.store is not False,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "metadata": body.metadata or {},
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
