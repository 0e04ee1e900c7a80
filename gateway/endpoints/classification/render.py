"""The responses of /v1/classify and /pooling, and of TEI's /predict."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import orjson

from gateway.endpoints.activations import activated, outputs_of
from gateway.endpoints.embeddings.render import prompt_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.heads import HeadActivation
    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.activations import Values
    from gateway.endpoints.embeddings.render import VectorShape
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.usage import Usage


@dataclass(frozen=True, slots=True)
class Classes:
    """The labels of a head's outputs, and the activation to apply."""

    labels: tuple[str, ...]
    activation: HeadActivation

    def of(self, choice: WholeChoice) -> Values:
        """Return the probabilities of a choice, [rows, labels]: one row, or one per token."""
        return activated(outputs_of(choice, len(self.labels)), self.activation)


@dataclass(frozen=True, slots=True)
class WholeClassification:
    """Renders classes in vLLM's shape."""

    head: ResponseHead
    classes: Classes

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; the label is that of the highest probability."""
        data = []
        for index, choice in enumerate(choices):
            probabilities = self.classes.of(choice)[0]
            label = self.classes.labels[int(probabilities.argmax())]
            data.append(
                {"index": index, "label": label, "probs": probabilities, "num_classes": len(self.classes.labels)}
            )
        answer = {
            "id": self.head.id,
            "object": "list",
            "created": self.head.created,
            "model": self.head.model,
            "data": data,
            "usage": {**prompt_usage(usage), "completion_tokens": 0},
        }
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(frozen=True, slots=True)
class WholePooling:
    """Renders vectors, probabilities of texts or those of their tokens in vLLM's shape, one input at a time."""

    head: ResponseHead
    # Of embeddings: their components; of a head: its classes, and whether there is a row for each token.
    results: VectorShape | Classes
    in_rows: bool
    encoding: Literal["float", "base64"]

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        start = {"id": self.head.id, "object": "list", "created": self.head.created, "model": self.head.model}
        yield orjson.dumps(start)[:-1] + b',"data":['
        for index, choice in enumerate(choices):
            values = self.results.of(choice)
            values = values if self.in_rows or values.ndim == 1 else values[0]
            written = _base64(values) if self.encoding == "base64" else np.ascontiguousarray(values)
            entry = {"index": index, "object": "pooling", "data": written}
            yield (b"," if index else b"") + orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"]," + orjson.dumps({"usage": {**prompt_usage(usage), "completion_tokens": 0}}).removeprefix(b"{")


@dataclass(frozen=True, slots=True)
class WholeTeiPrediction:
    """Renders the labels of texts with their scores, highest first, as TEI does."""

    classes: Classes
    # Whether the answer is a list for each input, as several inputs have it.
    in_lists: bool

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        predictions = [self._prediction(self.classes.of(choice)[0]) for choice in choices]
        return orjson.dumps(predictions if self.in_lists else predictions[0])

    def _prediction(self, probabilities: Values) -> list[dict[str, object]]:
        order = np.argsort(-probabilities, kind="stable").tolist()
        return [{"score": float(probabilities[label]), "label": self.classes.labels[label]} for label in order]


def _base64(values: Values) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
