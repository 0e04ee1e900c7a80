"""The bodies of /v1/classify and /pooling, and of TEI's /predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.requests import TokenPrompt
from gateway.endpoints.chat.schema import Conversation
from gateway.endpoints.completions.schema import parse_prompts
from gateway.endpoints.embeddings.schema import FLOAT32, LITTLE_ENDIAN, EmbeddingPooling, check_count, with_side
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.pooling import PoolingFields, lowered
from gateway.endpoints.schema import Refusal, is_empty

_EXPECTED = "should be a text, a pair of texts, or a list of texts and pairs"


class ClassificationFields(PoolingFields):
    """The common fields of bodies whose texts may be classified."""

    # vLLM's names: false returns the head's outputs themselves.
    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the head's outputs become probabilities."""
        return self.use_activation is not False and self.activation is not False


class ClassifyBody(ClassificationFields):
    """A request to classify texts or token sequences."""

    input: Annotated[list[str | TokenPrompt], BeforeValidator(parse_prompts)] = Field(strict=False)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        check_count(len(self.input), "input")
        return self


class _ChatFields(Conversation):
    """A conversation as the input; by default no answer is begun."""

    takes_images: ClassVar[bool] = False

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("input", is_empty, "leave it out, or leave out 'messages'"),
        Refusal("truncate", is_empty, "shorten the messages"),
        Refusal("truncate_prompt_tokens", lambda value: value == -1, "shorten the messages"),
    )

    @property
    def opens_answer(self) -> bool:
        return bool(self.add_generation_prompt)


class ClassifyChatBody(ClassificationFields, _ChatFields):
    """A request to classify a conversation, for example with a reward model."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (*ClassificationFields.unsupported, *_ChatFields.unsupported)


class _PoolingTask(ClassificationFields):
    """The fields of /pooling that do not depend on the input."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *ClassificationFields.unsupported,
        Refusal("data", is_empty, "use 'input'"),
        Refusal("softmax", lambda value: value is True, "use 'use_activation'"),
        FLOAT32,
        LITTLE_ENDIAN,
    )

    task: Literal["embed", "classify", "token_classify"] | None = None
    pooling: EmbeddingPooling | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    normalize: bool | None = None


class PoolingBody(_PoolingTask):
    """A request for embeddings or a head's outputs of texts or token sequences."""

    input: Annotated[list[str | TokenPrompt], BeforeValidator(parse_prompts)] = Field(strict=False)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        check_count(len(self.input), "input")
        return self


class PoolingChatBody(_PoolingTask, _ChatFields):
    """A request for the embedding or a head's outputs of a conversation."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (*_PoolingTask.unsupported, *_ChatFields.unsupported)


@dataclass(frozen=True, slots=True)
class TeiInputs:
    """Texts and pairs, whose second text is None for single ones; `in_lists`: several, each with a list as answer."""

    pairs: tuple[tuple[str, str | None], ...]
    in_lists: bool


def _tei_inputs(value: object) -> object:
    """Read TEI's forms of inputs: a list of two texts is a pair, and a list with lists holds several texts or pairs."""
    if isinstance(value, str):
        return TeiInputs(((value, None),), in_lists=False)
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("inputs_type", _EXPECTED)
    if all(isinstance(entry, str) for entry in value):
        return TeiInputs((_pair(value),), in_lists=False)
    pairs = tuple(_pair([entry] if isinstance(entry, str) else entry) for entry in value)
    return TeiInputs(pairs, in_lists=True)


def _pair(entry: object) -> tuple[str, str | None]:
    if not isinstance(entry, list) or not 1 <= len(entry) <= 2 or not all(isinstance(text, str) for text in entry):
        raise PydanticCustomError("inputs_type", _EXPECTED)
    return (entry[0], entry[1] if len(entry) == 2 else None)


class TeiPredictBody(PoolingFields):
    """A request to classify texts or pairs as clients of Hugging Face's Text Embeddings Inference send it."""

    inputs: Annotated[TeiInputs, BeforeValidator(_tei_inputs)]
    raw_scores: bool | None = None
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(lowered)] = None

    @model_validator(mode="before")
    @classmethod
    def _side(cls, body: Any) -> Any:  # Any: the client's JSON
        return with_side(body)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        check_count(len(self.inputs.pairs), "inputs")
        return self
