"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Request, Response

from gateway.endpoints.chat.schema import Conversation
from gateway.endpoints.generation_fields import TokenId  # noqa: TC001  (pydantic reads it at run time)
from gateway.endpoints.openapi import documented
from gateway.endpoints.plain_route import PlainRoute
from gateway.endpoints.schema import Schema, parse
from gateway.identity.caller import identify
from gateway.quotas.quotas import prompt_tokens

if TYPE_CHECKING:
    from common.types import Subject
    from gateway.backends import Backend
    from gateway.endpoints.context import Context
    from gateway.pipeline.messages import Tokenization


class TokenizeTextBody(Schema):
    """A text to encode."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Conversation):
    """A conversation to render and encode."""

    model: str | None = None


class DetokenizeBody(Schema):
    """Ids to decode."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


def create_router(context: Context) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=PlainRoute)

    @router.post("/tokenize", openapi_extra=documented(TokenizeTextBody, TokenizeChatBody))
    async def tokenize(request: Request) -> Response:
        """Encode a text, or a conversation with the model's chat template."""
        subject = identify(await context.caller(request)).subject
        raw = await context.body(request)
        encode = _encode_chat if "messages" in raw else _encode_text
        backend, encoded = await encode(request, subject, raw)
        limit = (await backend.served.card()).max_context_tokens
        answer: dict[str, object] = {"count": len(encoded.ids), "max_model_len": limit, "tokens": encoded.ids}
        if encoded.tokens:
            answer["token_strs"] = encoded.tokens
        return Response(orjson.dumps(answer), media_type="application/json")

    @router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Decode token ids into text."""
        subject = identify(await context.caller(request)).subject
        body = parse(DetokenizeBody, await context.body(request))
        backend = await context.models.find(body.model)
        skip = bool(body.skip_special_tokens)
        async with context.charged(request, subject, len(body.tokens)):
            text = await backend.model.detokenize(subject, tuple(body.tokens), skip_special_tokens=skip)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")

    async def _encode_text(request: Request, subject: Subject, raw: dict[str, object]) -> tuple[Backend, Tokenization]:
        body = parse(TokenizeTextBody, raw)
        backend = await context.models.find(body.model)
        special = body.add_special_tokens is not False
        async with context.charged(request, subject, prompt_tokens(body.prompt)) as spending:
            encoded = await backend.model.tokenize(subject, body.prompt, add_special_tokens=special)
            spending.tokens = len(encoded.ids)
        return backend, encoded if body.return_token_strs else encoded.without_strings()

    async def _encode_chat(request: Request, subject: Subject, raw: dict[str, object]) -> tuple[Backend, Tokenization]:
        body = parse(TokenizeChatBody, raw)
        backend = await context.models.find(body.model)
        return backend, await context.render_chat(request, subject, backend, body.to_prompt())

    return router
