"""The common fields of chat and text completions, and their conversion to parameters of the pipeline."""

from __future__ import annotations

import secrets
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.prompt_logprobs import PromptLogprobs
from common.sampling import MASK_64
from common.types import SamplingParams, StopConditions
from gateway.endpoints.requester_fields import SessionFields
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, never
from gateway.endpoints.structure_fields import StructureFields, refuse_with_grammar

MAX_CHOICES = 128
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_PATTERNS = 4
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
INT32_MAX = 2**31 - 1
MAX_ID_DIGITS = 10
# Smaller masses are not distinguishable in single precision, and 0 means "unset" on the wire; as with any smaller mass,
# one token remains.
LEAST_TOP_P = 1e-6
# Additional data that SGLang and vLLM can return.
RETURNED = (
    "return_cached_tokens_details",
    "return_meta_info",
    "return_prompt_text",
    "return_prompt_token_ids",
    "return_routed_experts",
    "return_tokens_as_token_ids",
)


def _stop_texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("stop_type", "should be a string or a list of strings")
    if len(texts) > MAX_STOP_TEXTS:
        raise PydanticCustomError("stop", "should have at most {limit} strings", {"limit": MAX_STOP_TEXTS})
    if any(not text or len(text) > MAX_STOP_CHARACTERS for text in texts):
        limit = {"limit": MAX_STOP_CHARACTERS}
        raise PydanticCustomError("stop", "each string should have 1 to {limit} characters", limit)
    return texts


def _bias_ids(value: dict[str, float] | None) -> dict[str, float] | None:
    for key in value or {}:
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS and int(key) <= INT32_MAX):
            raise PydanticCustomError("logit_bias", "keys should be token ids, as decimal numbers")
    return value


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopPatterns = Annotated[
    Annotated[list[str], Field(max_length=MAX_STOP_PATTERNS)] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
StopTexts = Annotated[list[str] | None, BeforeValidator(_stop_texts)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord] | None, Field(max_length=MAX_BAD_WORDS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias] | None, Field(max_length=MAX_BIASES), AfterValidator(_bias_ids)]


class StreamOptions(Schema):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_event_ids: bool | None = None


class GenerationFields(StructureFields, SessionFields):
    """The common fields of both completion endpoints; null always means the default."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("use_beam_search", is_empty, LEAVE_OUT),
        Refusal("logits_processors", is_empty, LEAVE_OUT),
        Refusal("session_params", is_empty, "use 'session_id', or /generate"),
        Refusal("return_hidden_states", is_empty, LEAVE_OUT),
        Refusal("custom_logit_processor", is_empty, LEAVE_OUT),
        Refusal("moderation", never, LEAVE_OUT),
        Refusal("custom_params", is_empty, LEAVE_OUT),
        Refusal("vllm_xargs", is_empty, LEAVE_OUT),
        Refusal("logprob_token_ids", is_empty, "use 'token_ids_logprob' of /generate"),
        Refusal("repetition_detection", is_empty, LEAVE_OUT),
        Refusal("truncation_side", lambda value: value == "left", '"left" is'),
        Refusal("watermarking", is_empty, LEAVE_OUT),
        *(Refusal(name, is_empty, LEAVE_OUT) for name in RETURNED),
    )

    model: str | None = None
    lora_path: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    stop: StopTexts = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    stop_regex: StopPatterns = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), le=MASK_64)
    logit_bias: Biases = None
    allowed_token_ids: list[TokenId] | None = Field(None, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: BadWords = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "'stream_options' is only allowed when 'stream' is true."
            raise InvalidRequestError(message, param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            message = "'prompt_logprobs' cannot be streamed."
            raise InvalidRequestError(message, param="prompt_logprobs")
        return self

    @property
    def prompt_logprobs_wanted(self) -> PromptLogprobs | None:
        """The requested log probabilities of the prompt; None: none."""
        return None if self.prompt_logprobs is None else PromptLogprobs(0, self.prompt_logprobs)

    @property
    def predicted_text(self) -> str:
        """Text that the output may repeat parts of; empty: none is known."""
        return ""

    @property
    def choices(self) -> int:
        """Number of completions of each prompt."""
        return self.n or 1

    @property
    def wants_usage_in_stream(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_event_ids(self) -> bool:
        """Whether the events of the stream have ids, which some clients do not expect."""
        return not self.stream_options or self.stream_options.include_event_ids is not False

    def sampling(self, top_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters.

        Without a seed, one is drawn here, so that a resumed request repeats its tokens.

        Raises:
            InvalidRequestError: another field contradicts the grammar.
        """
        refuse_with_grammar(self.grammar, allowed_token_ids=self.allowed_token_ids)
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=secrets.randbits(64) if self.seed is None else self.seed & MASK_64,
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            top_logprobs=top_logprobs,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            grammar=self.grammar,
        )

    def stop_conditions(self, max_tokens: int | None) -> StopConditions:
        """Return the conditions that end a choice.

        Raises:
            InvalidRequestError: `min_tokens` is greater than `max_tokens`.
        """
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            message = f"'min_tokens' ({min_tokens}) must not be greater than 'max_tokens' ({max_tokens})."
            raise InvalidRequestError(message, param="min_tokens")
        return StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            # Others are accepted, and never match.
            stop_token_ids=tuple(id_ for id_ in self.stop_token_ids or () if 0 <= id_ <= INT32_MAX),
            stop_strings=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_text=bool(self.include_stop_str_in_output or self.no_stop_trim),
            stop_patterns=tuple(self.stop_regex or ()),
        )
