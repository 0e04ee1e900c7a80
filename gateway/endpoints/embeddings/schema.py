"""The bodies of /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.names import check_name
from common.requests import TokenPrompt
from common.types import CacheMode, Pooling
from gateway.endpoints.completions.schema import parse_prompts
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, never

# Maximum texts of one request, as in OpenAI's API.
MAX_INPUTS = 2048


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


Inputs = Annotated[list[str | TokenPrompt], BeforeValidator(parse_prompts)]
Texts = Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)], BeforeValidator(_texts)]
Documents = Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS - 1)], BeforeValidator(_documents)]


class EmbeddingFields(Schema):
    """The common fields of all three bodies; null always means the default."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("truncate_prompt_tokens", never, "shorten the texts"),
        Refusal(
            "add_special_tokens", lambda value: value is True, "special tokens are added as the model's tokenizer does"
        ),
        Refusal("mm_processor_kwargs", is_empty, LEAVE_OUT),
        Refusal("activation", never, LEAVE_OUT),
    )

    model: str | None = None
    pooling: Pooling | None = Field(None, strict=False)
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_mode: CacheMode | None = Field(None, strict=False)
    user_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, in order of precedence."""
        return (("user_id", self.user_id), ("user", self.user), ("safety_identifier", self.safety_identifier))

    @property
    def routing_key(self) -> str | None:
        """Requests of one view with equal keys go to the same scheduler group.

        Raises:
            InvalidRequestError: it is not a valid name.
        """
        return check_name("prompt_cache_key", self.prompt_cache_key) if self.prompt_cache_key else None

    @property
    def session(self) -> str | None:
        """The conversation of the request; None if it has none.

        Raises:
            InvalidRequestError: it is not a valid name.
        """
        return check_name("session_id", self.session_id) if self.session_id else None


class EmbeddingBody(EmbeddingFields):
    """A request for embeddings of texts or token sequences."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *EmbeddingFields.unsupported,
        Refusal("messages", is_empty, "use 'input'"),
        Refusal("normalize", lambda value: value is True, "embeddings have length 1"),
        Refusal("embed_dtype", lambda value: value == "float32", '"float32" is'),
        Refusal("endianness", lambda value: value in ("native", "little"), '"little" is'),
    )

    input: Inputs = Field(strict=False)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if len(self.input) > MAX_INPUTS:
            message = f"'input' should have at most {MAX_INPUTS} entries, got {len(self.input)}."
            raise InvalidRequestError(message, param="input")
        return self


class ScoreBody(EmbeddingFields):
    """A request for similarities: of one text with each of several, or of pairs."""

    text_1: Texts
    text_2: Texts

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


class RerankBody(EmbeddingFields):
    """A request to order documents by their similarity to a query."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *EmbeddingFields.unsupported,
        Refusal("max_tokens_per_doc", never, "shorten the documents"),
        Refusal("max_chunks_per_doc", never, "shorten the documents"),
        Refusal("rank_fields", is_empty, "only 'text' is ranked"),
    )

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=1, le=INT32_MAX)
    return_documents: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _texts_only(cls, body: Any) -> Any:  # Any: the client's JSON
        if isinstance(body, dict) and isinstance(body.get("query"), dict):
            raise InvalidRequestError("'query' should be a text: others are not supported.", param="query")
        return body
