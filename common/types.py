"""Values that cross service borders, as frozen dataclasses; `common/wire` converts them from and to protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NewType

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.grammars import Grammar
    from common.prompt_logprobs import PromptLogprobs

RequestId = NewType("RequestId", str)
SubscriberId = NewType("SubscriberId", str)
RowSlot = NewType("RowSlot", int)
StepId = NewType("StepId", int)

# [tokens] int32. Vocabulary ids of every model fit; the wire carries them as fixed32.
TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is accountable for a request: evidence, quotas, fair shares, budgets and limits count subjects.

    `name` starts with its kind, so that names of different kinds never coincide: `user/NAME`, `key/ID`, `proxy`,
    `local` or `anonymous`. See gateway/identity/README.md.
    """

    tenant: str
    name: str

    def __str__(self) -> str:
        """Return `tenant/name`, for logs."""
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class View:
    """What a request may find in the cache: its subject's own entries, its tenant's, and the public ones.

    `salt` narrows the subject's own part: requests with other salts do not find it. Only the gateway makes views.
    """

    subject: Subject
    salt: str = ""

    @property
    def tenant(self) -> str:
        """The subject's organisation."""
        return self.subject.tenant


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn: a pure function of logits, these fields and the token's position."""

    # 0: the most likely token is always taken.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    # Beside top_logprobs: ids whose log probabilities are reported, too.
    logprob_token_ids: tuple[int, ...] = ()
    # Only these may be drawn; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    # The last id of each is not drawn after the others.
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    # What the whole output conforms to.
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def may_jump(self) -> bool:
        """Whether tokens that a grammar forces need no logits: log probabilities come from these."""
        return self.grammar is not None and self.top_logprobs is None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends; token conditions are the worker's, text conditions the detokenizer's."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    # Regular expressions; see `common/patterns`.
    stop_patterns: tuple[str, ...] = ()


class Sharing(Enum):
    """How far a tenant shares text that enough of its subjects have sent.

    NONE: not at all; its subjects find public text, and nothing of each other. TENANT: within the tenant. GLOBAL:
    also with other tenants that share the same text, where the operator allows sharing across tenants.
    """

    NONE = "none"
    TENANT = "tenant"
    GLOBAL = "global"


class CacheMode(Enum):
    """What a request may read from the prefix cache and put into it.

    PRIVATE is the default, except that the request is no reason to share its text with anybody.
    """

    DEFAULT = "default"
    PRIVATE = "private"
    NONE = "none"

    def at_least(self, other: CacheMode) -> CacheMode:
        """Return the stricter of two wishes: an opt-out of either side holds."""
        return max(self, other, key=_STRICTNESS.index)


_STRICTNESS = (CacheMode.DEFAULT, CacheMode.PRIVATE, CacheMode.NONE)


class Pooling(Enum):
    """Which hidden states become a prompt's embedding: the last token's, the mean of all, or the first token's."""

    LAST = "last"
    MEAN = "mean"
    # As encoders call it that put a token of this name before each text.
    FIRST = "cls"


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client had received of an interrupted choice: its token ids and the length of its text in characters."""

    token_ids: tuple[int, ...]
    delivered_characters: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """How a request continues its session: see `SessionTurn` in protos/pando/v1/common.proto."""

    name: str
    after: str | None = None
    offset: int | None = None
    drop_previous_output: bool = False
    replace: bool = False


@dataclass(frozen=True, slots=True)
class SessionWish:
    """A session to be opened for a view. None leaves the value to the scheduler."""

    view: View
    session: str
    capacity_tokens: int | None = None
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """What an opened session may hold, and for how long it waits for its next turn."""

    capacity_tokens: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The gateway subscription that a request's text goes to."""

    subscriber_id: SubscriberId
    detokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context headers of one request."""

    traceparent: str
    tracestate: str | None = None


class ToolStyle(Enum):
    """How a model writes tool calls; see `ToolStyle` in the contract."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(Enum):
    """Stable causes of a request's failure; `common/errors.py` maps them to gRPC status and HTTP code."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request's terminal error as a value, for streams that many requests share."""

    code: ErrorCode
    message: str
    param: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The one end of a choice. `error` is set exactly when the reason is ERROR.

    `embedding` is what a request for pooling gets: float32, little-endian, of length 1.
    """

    reason: FinishReason
    matched_token_id: int | None = None
    matched_text: str | None = None
    error: RequestFailure | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a sampled token, of the most likely ones, best first, and of those that were named."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to one submitted request; accepted unless `rejected` says why not."""

    request_id: RequestId
    prompt_tokens: int
    rejected: RequestFailure | None = None


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """An encoded, validated request on its way to the scheduler."""

    request_id: RequestId
    view: View
    reply_to: ReplyTo
    token_ids: TokenIds
    sampling: SamplingParams
    stop: StopConditions
    n: int = 1
    priority: int = 0
    cache_mode: CacheMode = CacheMode.DEFAULT
    skip_special_tokens: bool = True
    resume: Resume | None = None
    timeout_ms: int | None = None
    trace: TraceContext | None = None
    # The conversation it belongs to, within its view.
    session: str | None = None
    turn: SessionTurn | None = None
    max_context_tokens: int | None = None
    # Set: the prompt is embedded, and nothing is generated.
    pooling: Pooling | None = None
    prompt_logprobs: PromptLogprobs | None = None
    # What the tokenizer chooses a scheduler group by, where there are several; not sent to schedulers.
    routing_key: str | None = None
