"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.prompt_logprobs import PromptLogprobs
from common.requests import TokenPrompt
from gateway.endpoints.generation_fields import INT32_MAX, MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationFields
from gateway.endpoints.schema import LEAVE_OUT, Refusal, is_empty

DEFAULT_MAX_TOKENS = 16
# Choices of one response, summed over all its prompts.
MAX_TOTAL_CHOICES = 1024

EXPECTED = "should be a text, a list of texts, a list of token ids, or a list of lists of token ids"


def parse_prompts(value: object) -> object:
    """Convert each of the four forms of a prompt to a list of texts and token prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt_type", EXPECTED)
    types = set(map(type, value))
    if types == {str}:
        return value
    if types == {int}:
        return [_token_prompt(value)]
    if types == {list}:
        return [_token_prompt(ids) for ids in value]
    raise PydanticCustomError("prompt_type", EXPECTED)


def _token_prompt(ids: list[object]) -> TokenPrompt:
    # Checked as a whole, because a prompt may have 100,000 ids; compares types, because isinstance accepts `bool`.
    if not ids or set(map(type, ids)) != {int}:
        raise PydanticCustomError("prompt_type", EXPECTED)
    prompt = TokenPrompt(tuple(ids))  # type: ignore[arg-type]  # all are int
    if min(prompt.ids) < 0 or max(prompt.ids) > INT32_MAX:
        raise PydanticCustomError("prompt", "token ids should be in the model's vocabulary")
    return prompt


class CompletionBody(GenerationFields):
    """A request for completions of texts."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *GenerationFields.unsupported,
        Refusal("thinking_token_budget", lambda value: value == -1, "use chat completions"),
        Refusal("suffix", is_empty, LEAVE_OUT),
        Refusal("prompt_embeds", is_empty, LEAVE_OUT),
    )

    prompt: Annotated[list[str | TokenPrompt], BeforeValidator(parse_prompts)] = Field(strict=False)
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if len(self.prompt) * self.choices > MAX_TOTAL_CHOICES:
            message = f"Prompts times 'n' must be at most {MAX_TOTAL_CHOICES}, got {len(self.prompt) * self.choices}."
            raise InvalidRequestError(message, param="prompt")
        if self.best_of is not None and self.best_of < (self.n or 1):
            message = f"'best_of' ({self.best_of}) must not be less than 'n' ({self.n or 1})."
            raise InvalidRequestError(message, param="best_of")
        if self.is_contest and self.stream:
            message = "'best_of' greater than 'n' cannot be streamed: the best are known at the end only."
            raise InvalidRequestError(message, param="best_of")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequestError("'echo' shows whole prompts: leave out 'truncate_prompt_tokens'.", param="echo")
        return self

    @property
    def returned(self) -> int:
        """Number of completions returned for each prompt."""
        return self.n or 1

    @property
    def choices(self) -> int:
        """Number of completions generated for each prompt."""
        return max(self.returned, self.best_of or 1)

    @property
    def is_contest(self) -> bool:
        """Whether more completions are generated than returned."""
        return self.choices > self.returned

    @property
    def token_limit(self) -> int:
        """Maximum tokens of a choice."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompt_logprobs_wanted(self) -> PromptLogprobs | None:
        """The requested log probabilities of prompts; None: none."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        top = max((count for count in wanted if count is not None), default=None)
        return None if top is None else PromptLogprobs(0, top)

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives to report with each token's log probability; None: no log probabilities."""
        # The best completions are selected by their log probabilities.
        return self.logprobs if self.logprobs is not None or not self.is_contest else 0
