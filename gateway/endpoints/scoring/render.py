"""Scores of pairs of texts, and the responses of /v1/score and /v1/rerank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import orjson

from common.heads import HeadActivation
from gateway.endpoints.activations import activated, outputs_of
from gateway.endpoints.embeddings.render import normalized, prompt_usage, vector_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.usage import Usage


class Scorer(Protocol):
    """Computes the scores of pairs."""

    def scores(self, choices: Sequence[WholeChoice]) -> NDArray[np.float32]:
        """Return one score per pair, [pairs]."""


@dataclass(frozen=True, slots=True)
class HeadScorer:
    """Scores of a classification head with one output; each choice is a pair."""

    activation: HeadActivation

    def scores(self, choices: Sequence[WholeChoice]) -> NDArray[np.float32]:
        """Return one score per choice."""
        return activated(np.concatenate([outputs_of(choice, 1)[0] for choice in choices]), self.activation)


@dataclass(frozen=True, slots=True)
class CosineScorer:
    """Cosines of embeddings; the choices are the first texts (one for all pairs or for each), then the second ones."""

    first_texts: int

    def scores(self, choices: Sequence[WholeChoice]) -> NDArray[np.float32]:
        """Return one cosine per second text."""
        vectors = np.stack([normalized(vector_of(choice)) for choice in choices])
        cosines: NDArray[np.float32] = (vectors[: self.first_texts] * vectors[self.first_texts :]).sum(axis=1)
        return cosines


@dataclass(frozen=True, slots=True)
class WholeScores:
    """Renders scores in vLLM's shape."""

    head: ResponseHead
    scorer: Scorer

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        scores = self.scorer.scores(choices).tolist()
        return orjson.dumps(
            {
                "id": self.head.id,
                "object": "list",
                "created": self.head.created,
                "model": self.head.model,
                "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
                "usage": prompt_usage(usage),
            }
        )


@dataclass(frozen=True, slots=True)
class WholeRanking:
    """Renders documents ordered by their scores, in the shape of Jina's and Cohere's APIs."""

    head: ResponseHead
    scorer: Scorer
    documents: Sequence[str]
    top_n: int
    returns_documents: bool

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; documents with equal scores keep their order."""
        scores = self.scorer.scores(choices)
        results = [self._result(index, float(scores[index])) for index in ranked(scores)[: self.top_n]]
        tokens = {"input_tokens": usage.prompt_tokens}
        answer = {
            "id": self.head.id,
            "model": self.head.model,
            "results": results,
            "usage": prompt_usage(usage),
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens},
        }
        return orjson.dumps(answer)

    def _result(self, index: int, score: float) -> dict[str, object]:
        result: dict[str, object] = {"index": index, "relevance_score": score}
        if self.returns_documents:
            result["document"] = {"text": self.documents[index]}
        return result


@dataclass(frozen=True, slots=True)
class WholeTeiRanking:
    """Renders texts ordered by their scores as TEI does."""

    scorer: Scorer
    texts: Sequence[str]
    returns_texts: bool

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; texts with equal scores keep their order."""
        scores = self.scorer.scores(choices)
        answer: list[dict[str, object]] = [{"index": index, "score": float(scores[index])} for index in ranked(scores)]
        for result, index in zip(answer, ranked(scores), strict=True):
            if self.returns_texts:
                result["text"] = self.texts[index]
        return orjson.dumps(answer)


def ranked(scores: NDArray[np.float32]) -> list[int]:
    """Return the places of scores, the highest first."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order
