"""/generate, /open_session and /close_session, compatible with SGLang's clients and test kits."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import SessionWish
from gateway.backends import check_generates
from gateway.endpoints.answering import AnswerKind, AnswerPlan, answer
from gateway.endpoints.completions.route import one_per_prompt
from gateway.endpoints.native.render import NativeShape, NativeStream, WholeNative
from gateway.endpoints.native.schema import CloseSessionBody, GenerateBody, OpenSessionBody
from gateway.endpoints.routing import STREAMED
from gateway.endpoints.shapes import ResponseHead
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context
    from gateway.endpoints.opening import Json, Opening
    from gateway.identity.caller import Requester


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post(GENERATES.path, responses=STREAMED)
    async def generate(request: Request, body: GenerateBody, caller: Caller = Depends(context.caller)) -> Response:
        """Complete one or several texts."""
        return await answer(context, request, caller, GENERATES, body)

    @router.post("/open_session")
    async def open_session(
        request: Request, body: OpenSessionBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Open a session, which keeps its latest turn in the cache; return its id."""
        session = check_name("session_id", body.session_id) if body.session_id else f"sess-{secrets.token_hex(16)}"
        requester = identify(caller, body.user_names, body.cache_salt)
        backend = await context.models.find(body.model)
        wish = SessionWish(
            view=requester.view,
            session=session,
            capacity_tokens=body.capacity_of_str_len,
            timeout_ms=None if body.timeout is None else max(round(body.timeout * 1000), 1),
        )
        async with context.charged(request, requester.subject):
            grant = await backend.model.open_session(wish)
        headers = {
            "x-session-capacity-tokens": str(grant.capacity_tokens),
            "x-session-timeout-s": f"{grant.timeout_ms / 1000:g}",
        }
        return Response(orjson.dumps(session), media_type="application/json", headers=headers)

    @router.post("/close_session")
    async def close_session(
        request: Request, body: CloseSessionBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Close one of the caller's sessions."""
        session = check_name("session_id", body.session_id)
        requester = identify(caller, body.user_names, body.cache_salt)
        backend = await context.models.find(body.model)
        await context.charge_for_ending(request, requester.subject)
        if not await backend.model.close_session(requester.view, session):
            message = f"You have no open session '{session}' with this model; it may have timed out."
            raise InvalidRequestError(message, param="session_id")
        return Response(b"{}", media_type="application/json")


async def look_up(context: Context, request: Request, caller: Caller, body: GenerateBody) -> Json:
    """Return the images that the request does not contain itself."""
    if not body.has_images:
        return {}
    references = [reference for each in body.image_references() for reference in each]
    return await context.find_images(request, _requester(caller, body), references, body.model, body.lora_path)


async def plan(context: Context, opening: Opening, body: GenerateBody, requester: Requester) -> AnswerPlan:
    """Plan the completions of all texts."""
    turn = body.session_params
    chosen = await context.choose(requester.caller, body.model, body.lora_path, must_name=False)
    check_generates(chosen.card)
    completion = body.to_completion(chosen.name)
    head = ResponseHead(opening.id, 0, chosen.name, context.fingerprint)
    first = context.generate_request(opening, head, requester, completion, completion.prompt[0], chosen)
    sampling_params = replace(first.options.sampling, logprob_token_ids=body.logprob_token_ids)
    options = replace(first.options, sampling=sampling_params, prompt_logprobs=body.prompt_logprobs_wanted)
    # Without the part that makes it unique.
    name = body.rid or opening.id.rpartition(".")[0]
    if turn is not None:
        if len(completion.prompt) > 1:
            raise InvalidRequestError("A turn of a session has one prompt.", param="session_params")
        # A continuation of earlier tokens does not begin with a BOS token.
        adds = False if turn.rid else None
        first = replace(first, add_special_tokens=adds)
        options = replace(options, turn=turn.turn(name))
    requests = one_per_prompt(replace(first, options=options), completion.prompt)
    if body.has_images:
        requests = [
            replace(request, images=await context.read_images(chosen.card, references, opening))
            for request, references in zip(requests, body.image_references(), strict=True)
        ]
    asked = body.logprob_token_ids
    shape = NativeShape(name, completion.choices, bool(body.return_logprob), body.is_batch, asked)
    if body.stream:
        # SGLang's clients take every line of a stream for an event.
        return AnswerPlan(requests, stream=NativeStream(shape, len(requests)), has_event_ids=False)
    return AnswerPlan(requests, whole=WholeNative(shape))


def _new_id(body: GenerateBody) -> str:
    name = check_name("rid", body.rid) if body.rid else f"gen-{uuid.uuid4().hex}"
    # A client may reuse its own id; the pipeline's ids are globally unique.
    return f"{name[:128]}.{uuid.uuid4().hex}"


def _requester(caller: Caller, body: GenerateBody) -> Requester:
    return identify(caller, body.user_names, body.cache_salt)


GENERATES = AnswerKind(
    "/generate",
    GenerateBody,
    new_id=_new_id,
    requester=_requester,
    look_up=look_up,
    plan=plan,
)
