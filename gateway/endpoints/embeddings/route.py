"""/v1/embeddings, Cohere's /v2/embed and TEI's /embed."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.heads import Task
from common.requests import TokenPrompt
from gateway.backends import check_task
from gateway.endpoints.embeddings.prompts import prompt_of
from gateway.endpoints.embeddings.render import VectorShape, WholeCohereEmbeddings, WholeEmbeddings, WholeTeiEmbeddings
from gateway.endpoints.embeddings.schema import CohereEmbedBody, EmbeddingBody, TeiEmbedBody
from gateway.endpoints.pooling import PooledRequests
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import ModelInfo

# See `GenerateRequest.operation`.
OPERATION = "embeddings"


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/embeddings")
    async def create_embeddings(
        request: Request, body: EmbeddingBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Embed texts or token sequences."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_task(await context.models.require_named(body.model), Task.EMBED)
        check_dimensions(body.dimensions, card)
        prefix = prompt_of(card, body.prompt_name, body.input_type or body.task)
        check_texts_for_prompt(body.input, body.prompt_name)
        pooling = body.chosen_pooling or card.pooling
        pooled = PooledRequests(context, request, requester, body, card, f"embd-{uuid.uuid4().hex}", pooling, OPERATION)
        requests = pooled.make({"input": pooled.of_texts(body.input, prefix)})
        shape = VectorShape(body.dimensions, body.normalizes)
        return context.in_pieces(requests, WholeEmbeddings(card.name, shape, body.format))

    @router.post("/v2/embed")
    async def cohere_embed(
        request: Request, body: CohereEmbedBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Embed texts, in Cohere's shape."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_task(await context.models.require_named(body.model), Task.EMBED)
        check_dimensions(body.output_dimension, card, "output_dimension")
        prefix = prompt_of(card, body.prompt_name, body.input_type)
        head = context.head(f"embd-{uuid.uuid4().hex}", card.name)
        pooling = body.chosen_pooling or card.pooling
        pooled = PooledRequests(context, request, requester, body, card, head.id, pooling, OPERATION)
        requests = pooled.make({"texts" if body.texts else "inputs": pooled.of_texts(body.all_texts, prefix)})
        formats, shape = body.embedding_types or ["float"], VectorShape(body.output_dimension)
        return context.in_pieces(requests, WholeCohereEmbeddings(head, body.all_texts, shape, formats))

    @router.post("/embed")
    async def tei_embed(request: Request, body: TeiEmbedBody, caller: Caller = Depends(context.caller)) -> Response:
        """Embed texts or token sequences, in the shape of Text Embeddings Inference."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_task(await context.models.require(body.model), Task.EMBED)
        check_dimensions(body.dimensions, card)
        prefix = prompt_of(card, body.prompt_name)
        check_texts_for_prompt(body.inputs, body.prompt_name)
        pooling = body.chosen_pooling or card.pooling
        pooled = PooledRequests(context, request, requester, body, card, f"embd-{uuid.uuid4().hex}", pooling, OPERATION)
        requests = pooled.make({"inputs": pooled.of_texts(body.inputs, prefix)})
        shape = VectorShape(body.dimensions, body.normalize is not False)
        return context.in_pieces(requests, WholeTeiEmbeddings(shape))


def check_dimensions(dimensions: int | None, card: ModelInfo, param: str = "dimensions") -> None:
    """Check that the model's embeddings have at least `dimensions` components.

    Raises:
        InvalidRequestError: they have fewer.
    """
    if dimensions is not None and dimensions > card.embedding_dimensions:
        message = f"'{param}' must be at most {card.embedding_dimensions} for this model, got {dimensions}."
        raise InvalidRequestError(message, param=param)


def check_texts_for_prompt(inputs: list[str | TokenPrompt], name: str | None) -> None:
    """Check that a prompt can be put before the inputs.

    Raises:
        InvalidRequestError: some are token ids.
    """
    if name is not None and any(isinstance(given, TokenPrompt) for given in inputs):
        raise InvalidRequestError("'prompt_name' needs texts; some inputs are token ids.", param="prompt_name")
