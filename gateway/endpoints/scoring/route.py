"""/v1/score and /v1/rerank: by the model's classification head, or by the similarity of embeddings."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.heads import HeadActivation, Task
from common.requests import PooledText, Truncation
from gateway.backends import check_task
from gateway.endpoints.embeddings.prompts import DOCUMENT, QUERY, prompt_of
from gateway.endpoints.pooling import PooledRequests
from gateway.endpoints.scoring.render import CosineScorer, HeadScorer, WholeRanking, WholeScores, WholeTeiRanking
from gateway.endpoints.scoring.schema import RerankBody, ScoreBody, TeiRerankBody
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.requests import GenerateRequest, Prompt
    from gateway.endpoints.context import Context
    from gateway.endpoints.scoring.render import Scorer
    from gateway.endpoints.scoring.schema import ScoringFields


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/score", operation_id="score_without_version")
    @router.post("/v1/score", operation_id="score")
    async def score(request: Request, body: ScoreBody, caller: Caller = Depends(context.caller)) -> Response:
        """Score pairs of texts: by the model's head, or the cosine of their embeddings."""
        pooled = await _pooled(context, request, body, caller, "score")
        pairs = Pairs(body.text_1, body.text_2, ("text_1", "text_2"))
        requests, scorer = requests_of(pooled, body, pairs)
        head = context.head(pooled.response_id, pooled.card.name)
        return context.whole(requests, WholeScores(head, scorer))

    @router.post("/v2/rerank", operation_id="rerank_2")
    @router.post("/v1/rerank", operation_id="rerank")
    async def rerank(request: Request, body: RerankBody, caller: Caller = Depends(context.caller)) -> Response:
        """Order documents by their relevance for a query."""
        return await _rerank(request, body, caller)

    @router.post("/rerank", operation_id="rerank_without_version")
    async def rerank_either(
        request: Request, body: TeiRerankBody | RerankBody, caller: Caller = Depends(context.caller)
    ) -> Response:
        """Order documents as at /v1/rerank or, if they are called texts, as Text Embeddings Inference does."""
        if isinstance(body, RerankBody):
            return await _rerank(request, body, caller)
        pooled = await _pooled(context, request, body, caller, "rerank")
        pairs = Pairs([body.query], body.texts, ("query", "texts"), (QUERY, DOCUMENT))
        requests, scorer = requests_of(pooled, body, pairs)
        return context.whole(requests, WholeTeiRanking(scorer, body.texts, body.return_text is True))

    async def _rerank(request: Request, body: RerankBody, caller: Caller) -> Response:
        pooled = await _pooled(context, request, body, caller, "rerank")
        pairs = Pairs([body.query], body.documents, ("query", "documents"), (QUERY, DOCUMENT))
        requests, scorer = requests_of(pooled, body, pairs)
        head = context.head(pooled.response_id, pooled.card.name)
        top_n = len(body.documents) if body.top_n is None else body.top_n
        ranking = WholeRanking(head, scorer, body.documents, top_n, body.return_documents is not False)
        return context.whole(requests, ranking)


@dataclass(frozen=True, slots=True)
class Pairs:
    """First texts, one for all pairs or one for each, and second ones; the names of their fields, and their uses."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    names: tuple[str, str]
    # Embedding models may have prompts for them.
    uses: tuple[str | None, str | None] = (None, None)


async def _pooled(
    context: Context, request: Request, body: ScoringFields, caller: Caller, operation: str
) -> PooledRequests:
    requester = identify(caller, body.user_names, body.cache_salt)
    card = check_task(await context.models.require(body.model), Task.SCORE)
    pooling = card.head.pooling if card.head else body.chosen_pooling or card.pooling
    response_id = f"{operation}-{uuid.uuid4().hex}"
    return PooledRequests(context, request, requester, body, card, response_id, pooling, operation)


def requests_of(pooled: PooledRequests, body: ScoringFields, pairs: Pairs) -> tuple[list[GenerateRequest], Scorer]:
    """Return the requests for the scores of pairs, and the scorer of their results.

    Raises:
        InvalidRequestError: a field has no meaning for the model.
    """
    head = pooled.card.head
    if head is None:
        return pooled.make(_embedded(pooled, body, pairs)), CosineScorer(len(pairs.firsts))
    if body.pooling is not None:
        message = "'pooling' is for models that embed; this one scores pairs with its head."
        raise InvalidRequestError(message, param="pooling")
    firsts = pairs.firsts if len(pairs.firsts) > 1 else list(pairs.firsts) * len(pairs.seconds)
    cut, most = pooled.truncation, body.tokens_per_document
    prompts: list[Prompt] = [
        PooledText(first, second, body.instruction, most, cut)
        for first, second in zip(firsts, pairs.seconds, strict=True)
    ]
    activation = head.score_activation if body.activates else HeadActivation.NONE
    return pooled.make({pairs.names[1]: prompts}), HeadScorer(activation)


def _embedded(pooled: PooledRequests, body: ScoringFields, pairs: Pairs) -> dict[str, Sequence[Prompt]]:
    """Return the texts to embed, by the name of their field."""
    if body.instruction is not None:
        message = "'instruction' is for models that score pairs with a head; put it into the query."
        raise InvalidRequestError(message, param="instruction")
    first, second = (prompt_of(pooled.card, None, use) for use in pairs.uses)
    seconds = pooled.of_texts(pairs.seconds, second)
    if body.tokens_per_document is not None:
        most = min(body.tokens_per_document, pooled.max_tokens)
        seconds = [PooledText(second + text, truncation=Truncation(most)) for text in pairs.seconds]
    return {pairs.names[0]: pooled.of_texts(pairs.firsts, first), pairs.names[1]: seconds}
