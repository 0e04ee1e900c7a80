"""/generate, compatible with SGLang's clients and test kits."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError
from common.names import check_name
from gateway.api.completions import one_per_prompt
from gateway.api.plain_route import PlainRoute
from gateway.api.schema import documented
from gateway.backends import check_generates
from gateway.identity.caller import identify
from gateway.render.native import NativeShape, NativeStream, WholeNative
from gateway.render.shapes import ResponseHead
from gateway.schemas import refusals
from gateway.schemas.native import GenerateBody
from gateway.schemas.parse import parse

if TYPE_CHECKING:
    from gateway.api.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=PlainRoute)

    @router.post("/generate", openapi_extra=documented(GenerateBody))
    async def generate(request: Request) -> Response:
        """Complete one or several texts."""
        caller = await context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.NATIVE)
        sampling = raw.get("sampling_params")
        refusals.check(sampling if isinstance(sampling, dict) else {}, refusals.NATIVE_SAMPLING)
        body = parse(GenerateBody, raw)
        turn = body.session_params
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_generates(await context.models.require(body.model))
        completion = body.to_completion(card.name)
        name = check_name("rid", body.rid) if body.rid else f"gen-{uuid.uuid4().hex}"
        # A client may reuse its own id; the pipeline's ids are globally unique.
        head = ResponseHead(f"{name[:128]}.{uuid.uuid4().hex}", 0, card.name, context.fingerprint)
        first = context.generate_request(request, head, requester, completion, completion.prompt[0])
        sampling_params = replace(first.options.sampling, logprob_token_ids=body.logprob_token_ids)
        options = replace(first.options, sampling=sampling_params, prompt_logprobs=body.prompt_logprobs_wanted)
        if turn is not None:
            if len(completion.prompt) > 1:
                raise InvalidRequestError("A turn of a session has one prompt.", param="session_params")
            # A continuation of earlier tokens does not begin with a BOS token.
            adds = False if turn.rid else None
            first = replace(first, add_special_tokens=adds)
            options = replace(options, turn=turn.turn(name))
        requests = one_per_prompt(replace(first, options=options), completion.prompt)
        asked = body.logprob_token_ids
        shape = NativeShape(name, completion.choices, bool(body.return_logprob), is_batch_of(raw), asked)
        if body.stream:
            return context.stream(requester, requests, NativeStream(shape, len(requests)))
        return context.whole(requester, requests, WholeNative(shape))

    return router


def is_batch_of(raw: dict[str, object]) -> bool:
    """Whether the client sent a list of prompts."""
    ids = raw.get("input_ids")
    return isinstance(raw.get("text"), list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
