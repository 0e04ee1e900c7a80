"""/v1/completions."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request, Response

from common.requests import TokenPrompt
from common.types import RequestId
from gateway.backends import check_generates
from gateway.endpoints.answering import AnswerKind, AnswerPlan, add_continuation, answer
from gateway.endpoints.completions.render import BestOf, CompletionStream, Echo, WholeCompletion
from gateway.endpoints.completions.schema import CompletionBody
from gateway.endpoints.routing import STREAMED
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.requests import GenerateRequest
    from gateway.endpoints.context import Context
    from gateway.endpoints.opening import Opening
    from gateway.identity.caller import Requester


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post(COMPLETIONS.path, responses=STREAMED)
    async def create_completion(
        request: Request, body: CompletionBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Complete texts or token sequences."""
        return await answer(context, request, caller, COMPLETIONS, body)

    add_continuation(router, context, COMPLETIONS)


async def look_up(context: Context, request: Request, caller: Caller, body: CompletionBody) -> dict[str, Any]:
    """Return the texts of the prompts, if they are echoed."""
    if not body.echo:
        return {}
    check_generates((await context.choose(caller, body.model, body.lora_path)).card)
    requester = _requester(caller, body)
    return {"echo": await _echo(context, request, requester, body)}


async def plan(context: Context, opening: Opening, body: CompletionBody, requester: Requester) -> AnswerPlan:
    """Plan the completions of all prompts."""
    chosen = await context.choose(requester.caller, body.model, body.lora_path)
    check_generates(chosen.card)
    head = opening.head(chosen.name, context.fingerprint)
    first = context.generate_request(opening, head, requester, body, body.prompt[0], chosen)
    first = replace(first, add_special_tokens=body.add_special_tokens)
    requests = one_per_prompt(first, body.prompt)
    echo = Echo(opening.found["echo"], body.logprobs) if body.echo else None
    logprobs, ids = body.logprobs is not None, bool(body.return_token_ids)
    if body.stream:
        usage, choices = body.wants_usage_in_stream, body.choices
        chunks = CompletionStream(
            head, logprobs=logprobs, include_usage=usage, echo=echo, choices_per_prompt=choices, token_ids=ids
        )
        return AnswerPlan(requests, stream=chunks, has_event_ids=body.wants_event_ids)
    whole = WholeCompletion(head, logprobs=logprobs, echo=echo, prompt_top=body.prompt_logprobs, token_ids=ids)
    return AnswerPlan(requests, whole=BestOf(whole, body.choices, body.returned) if body.is_contest else whole)


def _requester(caller: Caller, body: CompletionBody) -> Requester:
    return identify(caller, body.user_names, body.cache_salt)


COMPLETIONS = AnswerKind(
    "/v1/completions",
    CompletionBody,
    new_id=lambda _body: f"cmpl-{uuid.uuid4().hex}",
    requester=_requester,
    plan=plan,
    has_stream_options=True,
    look_up=look_up,
)


def one_per_prompt(first: GenerateRequest, prompts: Sequence[str | TokenPrompt]) -> list[GenerateRequest]:
    """Return one request per prompt; several prompts get ids with a suffix, a single one keeps the response's id."""
    if len(prompts) == 1:
        return [first]
    return [
        replace(first, prompt=prompt, request_id=RequestId(f"{first.request_id}-{number}"))
        for number, prompt in enumerate(prompts)
    ]


async def _echo(context: Context, request: Request, requester: Requester, body: CompletionBody) -> list[str]:
    """Return the text that each choice echoes. Decoding ids is charged like /detokenize, once for all prompts."""
    skip = body.skip_special_tokens is not False
    chosen, subject = await context.choose(requester.caller, body.model, body.lora_path), requester.subject
    model = (await context.models.find(chosen.card.name)).model
    ids = sum(len(prompt.ids) for prompt in body.prompt if isinstance(prompt, TokenPrompt))

    async def text_of(prompt: str | TokenPrompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return await model.detokenize(subject, prompt.ids, skip_special_tokens=skip)

    async with context.charged(request, subject, ids) if ids else nullcontext():
        texts = await asyncio.gather(*map(text_of, body.prompt))
    return [text for text in texts for _ in range(body.returned)]
