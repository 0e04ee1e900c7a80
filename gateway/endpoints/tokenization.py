"""/tokenize and /detokenize: their bodies and routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway.endpoints.chat.schema import Conversation
from gateway.endpoints.generation_fields import TokenId
from gateway.endpoints.schema import Schema
from gateway.identity.caller import Caller, identify
from gateway.quotas.quotas import prompt_tokens

if TYPE_CHECKING:
    from common.types import Subject
    from gateway.backends import Backend
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import Tokenization


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


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/tokenize")
    async def tokenize(
        request: Request, body: TokenizeChatBody | TokenizeTextBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Encode a text, or a conversation with the model's chat template."""
        requester = identify(caller)
        subject = requester.subject
        backend = await context.models.find(body.model)
        if isinstance(body, TokenizeChatBody):
            images = await context.images_of(request, requester, await backend.served.card(), body.image_references())
            encoded = await context.render_chat(request, subject, backend, body.to_prompt(images=images))
        else:
            encoded = await _encode_text(request, subject, backend, body)
        limit = (await backend.served.card()).max_context_tokens
        answer: dict[str, object] = {"count": len(encoded.ids), "max_model_len": limit, "tokens": encoded.ids}
        if encoded.tokens:
            answer["token_strs"] = encoded.tokens
        return Response(orjson.dumps(answer), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeBody, caller: Caller = Depends(context.caller)) -> Response:
        """Decode token ids into text."""
        subject = identify(caller).subject
        backend = await context.models.find(body.model)
        skip = bool(body.skip_special_tokens)
        async with context.charged(request, subject, len(body.tokens)):
            text = await backend.model.detokenize(subject, tuple(body.tokens), skip_special_tokens=skip)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")

    async def _encode_text(
        request: Request, subject: Subject, backend: Backend, body: TokenizeTextBody
    ) -> Tokenization:
        special = body.add_special_tokens is not False
        async with context.charged(request, subject, prompt_tokens(body.prompt)) as spending:
            encoded = await backend.model.tokenize(subject, body.prompt, add_special_tokens=special)
            spending.tokens = len(encoded.ids)
        return encoded if body.return_token_strs else encoded.without_strings()
