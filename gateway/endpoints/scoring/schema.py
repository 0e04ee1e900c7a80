"""The bodies of /v1/score and /v1/rerank, and of TEI's /rerank."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from gateway.endpoints.embeddings.schema import EmbeddingFields, with_side
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.pooling import MAX_INPUTS, lowered
from gateway.endpoints.schema import Refusal, is_empty, never
from gateway.server.errors import ErrorStyle

# Other names of the two texts in vLLM.
_NAMES = (("queries", "documents"), ("data_1", "data_2"))


def _texts(value: object) -> object:
    """Convert a single text to a list."""
    return [value] if isinstance(value, str) else value


def _documents(value: object) -> object:
    """Return documents as texts: each is a text, or an object with one."""
    if not isinstance(value, list):
        return value
    return [_text_of(document) for document in value]


def _text_of(document: object) -> object:
    if isinstance(document, dict):
        text = document.get("text")
        if not isinstance(text, str):
            raise PydanticCustomError("documents_type", "each should be a text, or an object with a 'text'")
        return text
    return document


Texts = Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)], BeforeValidator(_texts)]
Documents = Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS - 1)], BeforeValidator(_documents)]


class ScoringFields(EmbeddingFields):
    """The common fields of bodies with pairs of texts."""

    # The task, for models whose notation of pairs has one.
    instruction: str | None = None
    # vLLM's names: false returns the head's output itself.
    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the head's output becomes a probability."""
        return self.use_activation is not False and self.activation is not False

    @property
    def tokens_per_document(self) -> int | None:
        """Most tokens of a second text; None: all."""
        return None


class ScoreBody(ScoringFields):
    """A request for scores: of one text with each of several, or of pairs."""

    text_1: Texts
    text_2: Texts

    @model_validator(mode="before")
    @classmethod
    def _names(cls, body: Any) -> Any:  # Any: the client's JSON
        for names in _NAMES if isinstance(body, dict) else ():
            if any(name in body for name in names) and "text_1" not in body and "text_2" not in body:
                given = {own: body[name] for own, name in zip(("text_1", "text_2"), names, strict=True) if name in body}
                return {**body, **given}
        return body

    @model_validator(mode="after")
    def _fit(self) -> Self:
        first, second = len(self.text_1), len(self.text_2)
        if first not in (1, second):
            message = f"'text_1' should be one text, or as many as 'text_2': {second}, got {first}."
            raise InvalidRequestError(message, param="text_1")
        if first + second > MAX_INPUTS:
            message = f"'text_1' and 'text_2' should have at most {MAX_INPUTS} texts, got {first + second}."
            raise InvalidRequestError(message, param="text_2")
        return self


class RerankBody(ScoringFields):
    """A request to order documents by their relevance for a query."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *ScoringFields.unsupported,
        Refusal("max_chunks_per_doc", never, "use 'max_tokens_per_doc'"),
        Refusal("rank_fields", is_empty, "only 'text' is ranked"),
    )

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=1, le=INT32_MAX)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1, le=INT32_MAX)

    @property
    def tokens_per_document(self) -> int | None:
        return self.max_tokens_per_doc

    @model_validator(mode="before")
    @classmethod
    def _texts_only(cls, body: Any) -> Any:  # Any: the client's JSON
        if isinstance(body, dict) and isinstance(body.get("query"), dict):
            query = body["query"].get("text")
            if not isinstance(query, str):
                message = "'query' should be a text, or an object with a 'text': others are not supported."
                raise InvalidRequestError(message, param="query")
            return {**body, "query": query}
        return body


class TeiRerankBody(ScoringFields):
    """A request to order texts as clients of Hugging Face's Text Embeddings Inference send it."""

    errors: ClassVar[ErrorStyle | None] = ErrorStyle.TEI

    query: str
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS - 1)]
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(lowered)] = None

    @property
    def activates(self) -> bool:
        """Whether the head's output becomes a probability."""
        return not self.raw_scores

    @model_validator(mode="before")
    @classmethod
    def _side(cls, body: Any) -> Any:  # Any: the client's JSON
        return with_side(body)
