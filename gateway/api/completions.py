"""/v1/completions."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from common.requests import GenerateRequest, TokenPrompt
from common.types import CacheMode, RequestId
from gateway.api.schema import documented
from gateway.identity import principal_of
from gateway.render.completions import CompletionStream, WholeCompletion
from gateway.schemas import refusals
from gateway.schemas.completions import CompletionBody
from gateway.schemas.parse import parse
from gateway.trace import trace_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.api.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=documented(CompletionBody))
    async def create_completion(request: Request) -> Response:
        """Continue texts or token sequences."""
        caller = context.caller(request)
        raw = await context.body(request)
        refusals.check(raw, refusals.COMPLETIONS)
        refusals.check_best_of(raw)
        body = parse(CompletionBody, raw)
        principal = principal_of(caller, body.user_names)
        card = await context.served.require(body.model)
        response_id = f"cmpl-{uuid.uuid4().hex}"
        template = GenerateRequest(
            request_id=RequestId(response_id),
            principal=principal,
            model=card.name,
            prompt="",
            sampling=body.sampling(body.logprobs),
            stop=body.stop_conditions(body.token_limit),
            n=body.choices,
            priority=body.priority or 0,
            cache_mode=body.cache_mode or CacheMode.DEFAULT,
            skip_special_tokens=body.skip_special_tokens is not False,
            timeout_ms=context.limits.request_timeout_ms,
            trace=trace_of(request.headers),
        )
        requests = _one_per_prompt(template, body.prompt)
        head = context.head(response_id, card.name)
        echoes = await _echoes(context, body) if body.echo else None
        logprobs = body.logprobs is not None
        if body.stream:
            usage = body.wants_usage_in_stream
            chunks = CompletionStream(head, logprobs=logprobs, include_usage=usage, echoes=echoes)
            return context.stream(requests, chunks)
        return context.whole(requests, WholeCompletion(head, logprobs=logprobs, echoes=echoes))

    return router


def _one_per_prompt(template: GenerateRequest, prompts: Sequence[str | TokenPrompt]) -> list[GenerateRequest]:
    """Return a request for each prompt; ids stay unique, and a single prompt keeps the response's own."""
    if len(prompts) == 1:
        return [replace(template, prompt=prompts[0])]
    return [
        replace(template, prompt=prompt, request_id=RequestId(f"{template.request_id}-{number}"))
        for number, prompt in enumerate(prompts)
    ]


async def _echoes(context: Context, body: CompletionBody) -> list[str]:
    """Return for each choice the text of its prompt."""
    skip = body.skip_special_tokens is not False

    async def text_of(prompt: str | TokenPrompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return await context.model.detokenize(prompt.ids, skip_special_tokens=skip)

    texts = await asyncio.gather(*map(text_of, body.prompt))
    return [text for text in texts for _ in range(body.choices)]
