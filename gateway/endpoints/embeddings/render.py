"""Vectors, and the responses of /v1/embeddings, Cohere's /v2/embed and TEI's /embed."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.embeddings.schema import Format
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.usage import Usage

Vector: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The components to return, and their scale."""

    # Number of leading components to return; None: all.
    dimensions: int | None = None
    normalizes: bool = True

    def of(self, choice: WholeChoice) -> Vector:
        """Return the embedding of a choice."""
        vector = vector_of(choice)[: self.dimensions]
        return normalized(vector) if self.normalizes else vector


@dataclass(frozen=True, slots=True)
class WholeEmbeddings:
    """Renders embeddings in OpenAI's shape, one at a time: thousands of them as decimal numbers take long."""

    model: str
    shape: VectorShape
    format: Format

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        for index, choice in enumerate(choices):
            value = written(self.shape.of(choice), self.format)
            entry = {"object": "embedding", "index": index, "embedding": value}
            yield (b"," if index else b"") + orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
        rest = {"model": self.model, "usage": prompt_usage(usage)}
        yield b"]," + orjson.dumps(rest).removeprefix(b"{")


@dataclass(frozen=True, slots=True)
class WholeCohereEmbeddings:
    """Renders embeddings by type, as Cohere's API does."""

    head: ResponseHead
    texts: Sequence[str]
    shape: VectorShape
    formats: Sequence[Format]

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        yield b'{"response_type":"embeddings_by_type","embeddings":{'
        for number, form in enumerate(dict.fromkeys(self.formats)):
            yield (b"," if number else b"") + orjson.dumps(form) + b":["
            for index, choice in enumerate(choices):
                value = written(self.shape.of(choice), form)
                yield (b"," if index else b"") + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
            yield b"]"
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": usage.prompt_tokens}}
        rest = {"id": self.head.id, "texts": self.texts, "meta": meta}
        yield b"}," + orjson.dumps(rest).removeprefix(b"{")


@dataclass(frozen=True, slots=True)
class WholeTeiEmbeddings:
    """Renders embeddings as TEI does: a list of vectors."""

    shape: VectorShape

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        for index, choice in enumerate(choices):
            vector = orjson.dumps(self.shape.of(choice), option=orjson.OPT_SERIALIZE_NUMPY)
            yield (b"," if index else b"[") + vector
        yield b"]"


def written(vector: Vector, form: Format) -> object:
    """Return a vector in a format of JSON values.

    `base64` is that of little-endian float32. The vector's largest component becomes 127 in `int8`, to which `uint8`
    adds 128. A bit says whether a component is above 0; eight of them, the first one most significant, are a
    byte of `ubinary`, and `binary` is that minus 128, as in sentence-transformers.
    """
    match form:
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case "int8":
            return _bytes_of(vector)
        case "uint8":
            return (_bytes_of(vector).astype(np.int16) + 128).astype(np.uint8)
        case "ubinary":
            return np.packbits(vector > 0)
        case "binary":
            return (np.packbits(vector > 0).astype(np.int16) - 128).astype(np.int8)
        case _:
            return vector


def _bytes_of(vector: Vector) -> NDArray[np.int8]:
    largest = float(np.abs(vector).max(initial=0.0))
    scaled: NDArray[np.int8] = np.rint(vector * (127 / largest if largest else 0.0)).astype(np.int8)
    return scaled


def vector_of(choice: WholeChoice) -> Vector:
    """Return a choice's result, [components] float32."""
    assert choice.embedding is not None, "the request asked for one"
    return np.frombuffer(choice.embedding, "<f4")


def normalized(vector: Vector) -> Vector:
    """Return a vector scaled to length 1; zeros stay zeros."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector


def prompt_usage(usage: Usage) -> dict[str, object]:
    """Return the token counts of requests that generate nothing."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
