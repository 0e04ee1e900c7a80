"""/predict and /info of Hugging Face's Text Embeddings Inference."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.heads import Task
from common.requests import PooledText
from common.types import Pooling
from common.version import version
from gateway.backends import check_task
from gateway.endpoints.classification.render import WholeTeiPrediction
from gateway.endpoints.classification.route import classes_of
from gateway.endpoints.classification.schema import TeiPredictBody
from gateway.endpoints.pooling import MAX_INPUTS, PooledRequests
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from common.requests import Prompt
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import ModelInfo

_POOLINGS = {Pooling.FIRST: "cls", Pooling.MEAN: "mean", Pooling.LAST: "last_token"}


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/predict")
    async def predict(request: Request, body: TeiPredictBody, caller: Caller = Depends(context.caller)) -> Response:
        """Return the labels of texts or pairs, in the shape of Text Embeddings Inference."""
        requester = identify(caller, body.user_names, body.cache_salt)
        card = check_task(await context.models.require(body.model), Task.CLASSIFY)
        response_id = f"predict-{uuid.uuid4().hex}"
        pooled = PooledRequests(context, request, requester, body, card, response_id, Pooling.CLASSIFY, "classify")
        cut = pooled.truncation
        prompts: list[Prompt] = [
            PooledText(text, second, truncation=cut) if second is not None or cut is not None else text
            for text, second in body.inputs.pairs
        ]
        renderer = WholeTeiPrediction(classes_of(card, activates=not body.raw_scores), body.inputs.in_lists)
        return context.whole(pooled.make({"inputs": prompts}), renderer)

    @router.get("/info", dependencies=[Depends(context.caller)])
    async def info() -> Response:
        """Describe the only or default model in the shape of Text Embeddings Inference."""
        card = await context.models.require(None)
        answer = {
            "model_id": card.name,
            "model_sha": None,
            "model_type": _type_of(card),
            "max_input_length": card.max_context_tokens,
            "max_client_batch_size": MAX_INPUTS,
            "auto_truncate": False,
            "version": version(),
        }
        return Response(orjson.dumps(answer), media_type="application/json")


def _type_of(card: ModelInfo) -> dict[str, object]:
    if card.head is None:
        return {"embedding": {"pooling": _POOLINGS[card.pooling]}}
    labels = {
        "id2label": {str(number): label for number, label in enumerate(card.head.labels)},
        "label2id": {label: number for number, label in enumerate(card.head.labels)},
    }
    return {"reranker" if card.head.scores_pairs else "classifier": labels}
