"""/v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.requests import GenerateRequest
from common.types import RequestId, RequestOptions
from gateway.endpoints.embeddings.render import WholeEmbeddings, WholeRanking, WholeScores
from gateway.endpoints.embeddings.schema import EmbeddingBody, RerankBody, ScoreBody
from gateway.identity.caller import Caller, identify
from gateway.server.middleware import trace_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.requests import Prompt
    from gateway.endpoints.context import Context
    from gateway.endpoints.embeddings.schema import EmbeddingFields
    from gateway.identity.caller import Requester
    from gateway.pipeline.port import ModelInfo


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/embeddings")
    async def create_embeddings(
        request: Request, body: EmbeddingBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Embed texts or token sequences."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = await context.models.require_named(body.model)
        check_dimensions(body.dimensions, card)
        embedding = _Embedding(context, request, requester, body, card, f"embd-{uuid.uuid4().hex}")
        requests = embedding.requests({"input": body.input})
        return context.in_pieces(
            requester, requests, WholeEmbeddings(card.name, body.encoding_format == "base64", body.dimensions)
        )

    @router.post("/score", operation_id="score_without_version")
    @router.post("/v1/score", operation_id="score")
    async def score(request: Request, body: ScoreBody, caller: Caller = Depends(context.caller)) -> Response:
        """Return the similarity of texts: the cosine of their embeddings."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = await context.models.require(body.model)
        head = context.head(f"score-{uuid.uuid4().hex}", card.name)
        embedding = _Embedding(context, request, requester, body, card, head.id)
        requests = embedding.requests({"text_1": body.text_1, "text_2": body.text_2})
        return context.whole(requester, requests, WholeScores(head, len(body.text_1)))

    @router.post("/rerank", operation_id="rerank_without_version")
    @router.post("/v2/rerank", operation_id="rerank_2")
    @router.post("/v1/rerank", operation_id="rerank")
    async def rerank(request: Request, body: RerankBody, caller: Caller = Depends(context.caller)) -> Response:
        """Order documents by their similarity to a query."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = await context.models.require(body.model)
        head = context.head(f"rerank-{uuid.uuid4().hex}", card.name)
        embedding = _Embedding(context, request, requester, body, card, head.id)
        requests = embedding.requests({"query": [body.query], "documents": body.documents})
        top_n = len(body.documents) if body.top_n is None else body.top_n
        ranking = WholeRanking(head, body.documents, top_n, body.return_documents is not False)
        return context.whole(requester, requests, ranking)


class _Embedding:
    """The common parts of the requests of one body."""

    def __init__(
        self,
        context: Context,
        request: Request,
        requester: Requester,
        body: EmbeddingFields,
        card: ModelInfo,
        response_id: str,
    ) -> None:
        self._context = context
        self._request = request
        self._requester = requester
        self._body = body
        self._card = card
        self._id = response_id

    def requests(self, named: dict[str, Sequence[Prompt]]) -> list[GenerateRequest]:
        """Return one request per prompt, in order; the keys of `named` are the names of the prompts in errors."""
        prompts = [(name, prompt) for name, prompts in named.items() for prompt in prompts]
        return [self._make(number, name, prompt) for number, (name, prompt) in enumerate(prompts)]

    def _make(self, number: int, name: str, prompt: Prompt) -> GenerateRequest:
        body, context = self._body, self._context
        return GenerateRequest(
            request_id=RequestId(f"{self._id}-{number}"),
            view=self._requester.view,
            model=self._card.name,
            prompt=prompt,
            options=RequestOptions(
                priority=self._requester.priority(body.priority, context.limits.max_priority),
                cache_mode=self._requester.cache_mode(body.cache_mode),
                timeout_ms=context.limits.request_timeout_ms,
                trace=trace_of(self._request.headers),
                session=body.session,
                max_context_tokens=context.quotas.max_context(self._requester.subject),
                pooling=body.pooling or self._card.pooling,
            ),
            prompt_name=name,
            routing_key=body.routing_key,
        )


def check_dimensions(dimensions: int | None, card: ModelInfo) -> None:
    """Check that the model's embeddings have at least `dimensions` components.

    Raises:
        InvalidRequestError: they have fewer.
    """
    if dimensions is not None and dimensions > card.embedding_dimensions:
        message = f"'dimensions' must be at most {card.embedding_dimensions} for this model, got {dimensions}."
        raise InvalidRequestError(message, param="dimensions")
