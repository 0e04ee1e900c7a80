"""Responses of /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.generation import Usage


@dataclass(frozen=True, slots=True)
class WholeEmbeddings:
    """Renders embeddings in OpenAI's shape, one at a time: thousands of them as decimal numbers take long."""

    model: str
    as_base64: bool
    # Number of leading components to return, rescaled to length 1; None: all.
    dimensions: int | None

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        for index, choice in enumerate(choices):
            entry = {"object": "embedding", "index": index, "embedding": self._value(choice)}
            yield (b"," if index else b"") + orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
        rest = {"model": self.model, "usage": prompt_usage(usage)}
        yield b"]," + orjson.dumps(rest).removeprefix(b"{")

    def _value(self, choice: WholeChoice) -> str | NDArray[np.float32]:
        vector = vector_of(choice)
        if self.dimensions is not None and self.dimensions < vector.size:
            vector = shortened(vector, self.dimensions)
        return base64.b64encode(vector.tobytes()).decode() if self.as_base64 else vector


@dataclass(frozen=True, slots=True)
class WholeScores:
    """Renders similarities in vLLM's shape. The choices are the first texts, then the second ones."""

    head: ResponseHead
    first_texts: int

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        firsts, seconds = vectors_of(choices[: self.first_texts]), vectors_of(choices[self.first_texts :])
        scores = (firsts * seconds).sum(axis=1).tolist()
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
    """Renders documents ordered by similarity, in the shape of Jina's and Cohere's APIs.

    The choices are the query, then the documents.
    """

    head: ResponseHead
    documents: Sequence[str]
    top_n: int
    returns_documents: bool

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; equally similar documents keep their order."""
        scores = vectors_of(choices[1:]) @ vector_of(choices[0])
        order = np.argsort(-scores, kind="stable")[: self.top_n].tolist()
        results = [self._result(index, float(scores[index])) for index in order]
        answer = {"id": self.head.id, "model": self.head.model, "results": results, "usage": prompt_usage(usage)}
        return orjson.dumps(answer)

    def _result(self, index: int, score: float) -> dict[str, object]:
        result: dict[str, object] = {"index": index, "relevance_score": score}
        if self.returns_documents:
            result["document"] = {"text": self.documents[index]}
        return result


def vector_of(choice: WholeChoice) -> NDArray[np.float32]:
    """Return a choice's embedding, [components] float32."""
    assert choice.embedding is not None, "the request asked for one"
    return np.frombuffer(choice.embedding, "<f4")


def vectors_of(choices: Sequence[WholeChoice]) -> NDArray[np.float32]:
    """Return the choices' embeddings, [choices, components] float32."""
    return np.stack([vector_of(choice) for choice in choices])


def shortened(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the first `dimensions` components, scaled to length 1; zeros stay zeros."""
    part = vector[:dimensions]
    length = np.linalg.norm(part)
    return part / length if length else part


def prompt_usage(usage: Usage) -> dict[str, object]:
    """Return the token counts of requests that generate nothing."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
