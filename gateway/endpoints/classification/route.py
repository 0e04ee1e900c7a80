"""/v1/classify and /pooling."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.heads import HeadActivation, Task
from common.types import Pooling
from gateway.backends import check_task
from gateway.endpoints.classification.render import Classes, WholeClassification, WholePooling
from gateway.endpoints.classification.schema import (
    ClassifyBody,
    ClassifyChatBody,
    PoolingBody,
    PoolingChatBody,
)
from gateway.endpoints.embeddings.render import VectorShape
from gateway.endpoints.embeddings.route import check_dimensions
from gateway.endpoints.pooling import PooledRequests
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.requests import Prompt
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import ModelInfo

# Outputs of a head of each token for all inputs of a request, estimated from their bytes: 64 MB.
MAX_TOKEN_OUTPUTS = 16_777_216


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/classify", operation_id="classify_without_version")
    @router.post("/v1/classify", operation_id="classify")
    async def classify(
        request: Request, body: ClassifyChatBody | ClassifyBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Return the probability of each label, for texts or a conversation."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_task(await context.models.require(body.model), Task.CLASSIFY)
        head = context.head(f"classify-{uuid.uuid4().hex}", card.name)
        pooled = PooledRequests(context, request, requester, body, card, head.id, Pooling.CLASSIFY, "classify")
        renderer = WholeClassification(head, classes_of(card, activates=body.activates))
        return context.whole(pooled.make(_prompts(pooled, body)), renderer)

    @router.post("/v1/pooling", operation_id="pooling_1")
    @router.post("/pooling", operation_id="pooling")
    async def pooling(
        request: Request, body: PoolingChatBody | PoolingBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Return embeddings, a head's outputs for texts or a conversation, or those for each token."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = await context.models.require(body.model)
        own = card.head.pooling.value if card.head else Task.EMBED.value
        task = Task(body.task or own)
        check_task(card, task)
        head = context.head(f"pool-{uuid.uuid4().hex}", card.name)
        if task is Task.EMBED:
            check_dimensions(body.dimensions, card)
            kind = Pooling(body.pooling) if body.pooling else card.pooling
            results: VectorShape | Classes = VectorShape(body.dimensions, body.normalize is not False)
        else:
            _refuse_embedding_fields(body)
            kind = Pooling(task.value)
            results = classes_of(card, activates=body.activates)
        pooled = PooledRequests(context, request, requester, body, card, head.id, kind, "pooling")
        prompts = _prompts(pooled, body)
        if kind is Pooling.TOKEN_CLASSIFY:
            _check_outputs(body, card)
        in_rows = kind is Pooling.TOKEN_CLASSIFY
        renderer = WholePooling(head, results, in_rows, body.encoding_format or "float")
        return context.in_pieces(pooled.make(prompts), renderer)


def classes_of(card: ModelInfo, *, activates: bool) -> Classes:
    """Return the classes of a model with a head."""
    assert card.head is not None, "the model has the task"
    return Classes(card.head.labels, card.head.activation if activates else HeadActivation.NONE)


def _prompts(
    pooled: PooledRequests, body: ClassifyChatBody | ClassifyBody | PoolingChatBody | PoolingBody
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts of a body, by the name of their field."""
    if isinstance(body, ClassifyChatBody | PoolingChatBody):
        if references := body.image_references():
            raise InvalidRequestError("This endpoint takes no images; it reads text only.", param=references[0].param)
        return {"messages": [body.to_prompt()]}
    return {"input": pooled.of_texts(body.input)}


def _refuse_embedding_fields(body: PoolingBody | PoolingChatBody) -> None:
    for name in ("pooling", "dimensions", "normalize"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"'{name}' is for embeddings; this model classifies.", param=name)


def _check_outputs(body: PoolingBody | PoolingChatBody, card: ModelInfo) -> None:
    """Check that the outputs for all inputs fit in memory: a text has at most as many tokens as bytes.

    Raises:
        InvalidRequestError: they do not.
    """
    labels = len(card.head.labels) if card.head else 1
    if isinstance(body, PoolingChatBody):
        return
    sizes = (len(text.encode()) if isinstance(text, str) else len(text.ids) for text in body.input)
    count = sum(min(size, card.max_context_tokens) for size in sizes) * labels
    if count > MAX_TOKEN_OUTPUTS:
        message = f"The inputs may have {count} outputs, at most {MAX_TOKEN_OUTPUTS} are allowed: send fewer at a time."
        raise InvalidRequestError(message, param="input")
