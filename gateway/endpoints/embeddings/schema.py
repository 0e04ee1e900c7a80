"""The bodies of /v1/embeddings, Cohere's /v2/embed and TEI's /embed."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.requests import TokenPrompt
from common.types import Pooling
from gateway.endpoints.completions.schema import parse_prompts
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.pooling import MAX_INPUTS, PoolingFields, lowered
from gateway.endpoints.schema import LEAVE_OUT, Refusal, is_empty, never

FLOAT32 = Refusal("embed_dtype", lambda value: value == "float32", '"float32" is')
LITTLE_ENDIAN = Refusal("endianness", lambda value: value in ("native", "little"), '"little" is')


def parse_texts(value: object) -> object:
    """Convert a single text to a list, and objects with a text, as Jina's clients send them, to texts."""
    if isinstance(value, list):
        return parse_prompts([_text_of(entry) for entry in value])
    return parse_prompts(value)


def _text_of(entry: object) -> object:
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return entry["text"]
    return entry


def _one_format(value: object) -> object:
    """Jina's clients may send a list of one format."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def check_count(count: int, param: str) -> None:
    """Check the number of texts in the field `param`.

    Raises:
        InvalidRequestError: there are too many.
    """
    if count > MAX_INPUTS:
        message = f"'{param}' should have at most {MAX_INPUTS} entries, got {count}."
        raise InvalidRequestError(message, param=param)


Inputs = Annotated[list[str | TokenPrompt], BeforeValidator(parse_texts)]
EmbeddingPooling = Literal["last", "mean", "cls"]
Format = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbeddingFields(PoolingFields):
    """The common fields of bodies of which texts may be embedded."""

    pooling: EmbeddingPooling | None = None

    @property
    def chosen_pooling(self) -> Pooling | None:
        """The pooling that the body asks for; None: the model's own."""
        return Pooling(self.pooling) if self.pooling else None


class EmbeddingBody(EmbeddingFields):
    """A request for embeddings of texts or token sequences."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *EmbeddingFields.unsupported,
        Refusal("messages", is_empty, "use 'input'"),
        Refusal("late_chunking", is_empty, "embed the chunks"),
        Refusal("activation", never, LEAVE_OUT),
        FLOAT32,
        LITTLE_ENDIAN,
    )

    input: Inputs = Field(strict=False)
    encoding_format: Literal["float", "base64"] | None = None
    # Jina's name, with further formats.
    embedding_type: Annotated[Format | None, BeforeValidator(_one_format)] = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    normalize: bool | None = None
    # Jina's name.
    normalized: bool | None = None
    # A prompt of the model's config_sentence_transformers.json.
    prompt_name: str | None = None
    # Cohere's and Jina's names of uses, for which the model may have a prompt.
    input_type: str | None = None
    task: str | None = None

    @property
    def format(self) -> Format:
        """Form in which vectors are written."""
        return self.encoding_format or self.embedding_type or "float"

    @property
    def normalizes(self) -> bool:
        """Whether vectors are scaled to length 1."""
        return self.normalize is not False and self.normalized is not False

    @model_validator(mode="after")
    def _limits(self) -> Self:
        check_count(len(self.input), "input")
        return self


def _content_texts(value: object) -> object:
    """Return Cohere's inputs, which are lists of parts, as texts."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, entry in enumerate(value):
        parts = entry.get("content") if isinstance(entry, dict) else None
        kinds = [part.get("type") if isinstance(part, dict) else None for part in parts] if parts else []
        if (
            not isinstance(parts, list)
            or set(kinds) != {"text"}
            or not all(isinstance(p.get("text"), str) for p in parts)
        ):
            message = "input {number} should have a 'content' of text parts; this model reads text only"
            raise PydanticCustomError("content", message, {"number": number})
        texts.append("\n".join(part["text"] for part in parts))
    return texts


class CohereEmbedBody(EmbeddingFields):
    """A request for embeddings as Cohere's clients send it."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *EmbeddingFields.unsupported,
        Refusal("images", is_empty, "this model reads text only"),
    )

    texts: list[str] | None = Field(None, min_length=1)
    inputs: Annotated[list[str] | None, BeforeValidator(_content_texts)] = Field(None, min_length=1)
    input_type: str | None = None
    embedding_types: list[Format] | None = Field(None, min_length=1)
    output_dimension: int | None = Field(None, ge=1, le=INT32_MAX)
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    prompt_name: str | None = None

    @property
    def all_texts(self) -> list[str]:
        """The texts to embed."""
        return self.texts or self.inputs or []

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, body: Any) -> Any:  # Any: the client's JSON
        """Cohere shortens texts unless the request says otherwise."""
        if not isinstance(body, dict):
            return body
        limit = body.get("max_tokens")
        stated = {"truncate": "END"} if body.get("truncate") is None else {}
        if isinstance(limit, int) and body.get("truncate_prompt_tokens") is None:
            stated["truncate_prompt_tokens"] = limit  # type: ignore[assignment]  # free JSON
        return {**body, **stated}

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if bool(self.texts) == bool(self.inputs):
            raise InvalidRequestError("Exactly one of 'texts' and 'inputs' should be given.", param="texts")
        check_count(len(self.all_texts), "texts" if self.texts else "inputs")
        return self


class TeiEmbedBody(EmbeddingFields):
    """A request for embeddings as clients of Hugging Face's Text Embeddings Inference send it."""

    inputs: Inputs = Field(strict=False)
    normalize: bool | None = None
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(lowered)] = None
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)

    @model_validator(mode="before")
    @classmethod
    def _side(cls, body: Any) -> Any:  # Any: the client's JSON
        return with_side(body)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        check_count(len(self.inputs), "inputs")
        return self


def with_side(body: Any) -> Any:  # Any: the client's JSON
    """Return a body with TEI's truncation_direction as truncation_side."""
    if isinstance(body, dict) and body.get("truncation_direction") is not None and "truncation_side" not in body:
        return {**body, "truncation_side": body["truncation_direction"]}
    return body
