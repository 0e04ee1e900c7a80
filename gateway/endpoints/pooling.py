"""The common parts of endpoints that generate nothing: fields, requests, and the check of the model's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from common.errors import InvalidRequestError
from common.requests import GenerateRequest, PooledText, TokenPrompt, Truncation
from common.types import RequestId, RequestOptions
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.requester_fields import SessionFields
from gateway.endpoints.schema import LEAVE_OUT, Refusal, is_empty
from gateway.server.middleware import begin_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import Request

    from common.requests import Prompt
    from common.types import Pooling
    from gateway.endpoints.context import Context
    from gateway.identity.caller import Requester
    from gateway.pipeline.port import ModelInfo

# Maximum texts of one request, as in OpenAI's API.
MAX_INPUTS = 2048


def lowered(value: object) -> object:
    """Return a word in lower case; other values unchanged."""
    return value.lower() if isinstance(value, str) else value


# Booleans are those of TEI and Jina, words those of Cohere.
Truncate: TypeAlias = Annotated[Literal[True, False, "none", "start", "end"] | None, BeforeValidator(lowered)]
Side: TypeAlias = Annotated[Literal["left", "right"] | None, BeforeValidator(lowered)]


class PoolingFields(SessionFields):
    """The fields of all bodies; null always means the default."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("add_special_tokens", lambda value: value is True, "special tokens are added as the tokenizer does"),
        Refusal("mm_processor_kwargs", is_empty, LEAVE_OUT),
    )

    model: str | None = None
    truncate: Truncate = None
    # -1: the model's context.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    # The side at which tokens are dropped.
    truncation_side: Side = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)

    def truncation(self, context: int) -> Truncation | None:
        """Return the truncation of texts, to at most `context` tokens; None: texts that are too long are refused.

        Raises:
            InvalidRequestError: more tokens than `context` are asked for.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is not None and wanted > context:
            message = f"'truncate_prompt_tokens' must be at most {context}, the context of this model, got {wanted}."
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        if wanted is None and self.truncate in (None, False, "none"):
            return None
        drop_beginning = self.truncate == "start" or self.truncation_side == "left"
        return Truncation(context if wanted in (None, -1) else wanted or 0, drop_beginning)


@dataclass(frozen=True, slots=True)
class PooledRequests:
    """Builds the requests of one body, which all have the same options."""

    context: Context
    request: Request
    requester: Requester
    body: PoolingFields
    card: ModelInfo
    response_id: str
    pooling: Pooling
    # See `GenerateRequest`.
    operation: str

    @property
    def max_tokens(self) -> int:
        """The longest prompt, in tokens."""
        own = self.context.quotas.max_context(self.requester.subject)
        return self.card.max_context_tokens if own is None else min(own, self.card.max_context_tokens)

    @property
    def truncation(self) -> Truncation | None:
        """Rule by which texts are shortened."""
        return self.body.truncation(self.max_tokens)

    def of_texts(self, texts: Sequence[str | TokenPrompt], prefix: str = "") -> list[Prompt]:
        """Return the prompts of texts, each after `prefix`, or of ids; shortened as the body says."""
        cut = self.truncation
        return [cut_ids(text, cut) if isinstance(text, TokenPrompt) else _text(prefix + text, cut) for text in texts]

    def make(self, named: dict[str, Sequence[Prompt]]) -> list[GenerateRequest]:
        """Return one request per prompt, in order; the keys of `named` are the names of the prompts in errors."""
        prompts = [(name, prompt) for name, prompts in named.items() for prompt in prompts]
        return [self._make(number, name, prompt) for number, (name, prompt) in enumerate(prompts)]

    def _make(self, number: int, name: str, prompt: Prompt) -> GenerateRequest:
        body, context = self.body, self.context
        return GenerateRequest(
            request_id=RequestId(f"{self.response_id}-{number}"),
            view=self.requester.view,
            model=self.card.name,
            prompt=prompt,
            options=RequestOptions(
                priority=self.requester.priority(body.priority, context.limits.max_priority),
                cache_mode=self.requester.cache_mode(body.cache_mode),
                timeout_ms=None if self.requester.caller.is_batch else context.limits.request_timeout_ms,
                trace=begin_trace(self.request.scope, self.request.headers),
                session=body.session,
                max_context_tokens=context.quotas.max_context(self.requester.subject),
                pooling=self.pooling,
                is_batch=self.requester.caller.is_batch,
            ),
            prompt_name=name,
            routing_key=body.routing_key,
            operation=self.operation,
        )


def cut_ids(prompt: TokenPrompt, cut: Truncation | None) -> TokenPrompt:
    """Return the ids that truncation leaves."""
    if cut is None:
        return prompt
    return TokenPrompt(prompt.ids[-cut.max_tokens :] if cut.drop_beginning else prompt.ids[: cut.max_tokens])


def _text(text: str, cut: Truncation | None) -> Prompt:
    return text if cut is None else PooledText(text, truncation=cut)
