"""Values that services exchange, as frozen dataclasses; `common/wire` converts them from and to protobuf."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.grammars import Grammar
    from common.prompt_logprobs import PromptLogprobs

RequestId = NewType("RequestId", str)
SubscriberId = NewType("SubscriberId", str)
RowSlot = NewType("RowSlot", int)
SnapshotSlot = NewType("SnapshotSlot", int)
AdapterSlot = NewType("AdapterSlot", int)
EncoderOutputId = NewType("EncoderOutputId", int)
StepId = NewType("StepId", int)

# [tokens] int32, which holds the ids of every vocabulary; the wire type is fixed32.
TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Subject:
    """The party accountable for a request: evidence, quotas, fair shares, budgets and limits are counted per subject.

    `name` starts with its kind, so that names of different kinds never collide: `user/NAME`, `key/ID`, `proxy`,
    `local` or `anonymous`. See gateway/identity/README.md.
    """

    tenant: str
    name: str

    def __str__(self) -> str:
        """Return `tenant/name`, for logs."""
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class View:
    """The cache entries that a request may use: its subject's private ones, its tenant's, and the public ones.

    `salt` divides the private entries: requests with another salt do not find them. Only the gateway creates views.
    """

    subject: Subject
    salt: str = ""

    @property
    def tenant(self) -> str:
        """The subject's organisation."""
        return self.subject.tenant


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, a pure function of the logits, these fields and the token's position."""

    # 0: greedy decoding.
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
    # Ids whose log probabilities are reported in addition to those of `top_logprobs`.
    logprob_token_ids: tuple[int, ...] = ()
    # Only these may be sampled; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    # The last id of each sequence is not sampled after the other ids.
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    # The grammar that the whole output must match.
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def may_jump(self) -> bool:
        """Whether tokens that the grammar determines may be appended without a pass: log probabilities need logits."""
        return self.grammar is not None and self.top_logprobs is None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends; workers check the token conditions, detokenizers the text conditions."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    # Regular expressions; see `common/patterns`.
    stop_patterns: tuple[str, ...] = ()


class Sharing(Enum):
    """How widely a tenant shares cached text once enough of its subjects have sent it.

    NONE: not at all; its subjects find public text, but none of each other's. TENANT: within the tenant. GLOBAL: also
    with other tenants that share the same text, if the operator allows sharing across tenants.
    """

    NONE = "none"
    TENANT = "tenant"
    GLOBAL = "global"


class CacheMode(Enum):
    """How a request may use the prefix cache.

    DEFAULT: it reads and stores prefixes, and is evidence for sharing its text. PRIVATE: as DEFAULT, but it is not
    evidence for sharing. NONE: it neither reads nor stores anything.
    """

    DEFAULT = "default"
    PRIVATE = "private"
    NONE = "none"

    def at_least(self, other: CacheMode) -> CacheMode:
        """Return the stricter of two modes: an opt-out by either side holds."""
        return max(self, other, key=_STRICTNESS.index)


_STRICTNESS = (CacheMode.DEFAULT, CacheMode.PRIVATE, CacheMode.NONE)


class Pooling(Enum):
    """How hidden states become a prompt's result: an embedding, or outputs of the model's classification head.

    Embeddings: the last token's hidden state, the mean of all, or the first token's. Outputs of the head: for the whole
    prompt, or for each token.
    """

    LAST = "last"
    MEAN = "mean"
    # Named for the CLS token that encoders put before each text.
    FIRST = "cls"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"

    @property
    def embeds(self) -> bool:
        """Whether the result is an embedding."""
        return self not in (Pooling.CLASSIFY, Pooling.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True)
class Resume:
    """The part of an interrupted choice that the client has: its token ids and its text's length in characters."""

    token_ids: tuple[int, ...]
    delivered_characters: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The turn of a session that a request is; see `SessionTurn` in protos/pando/v1/sessions.proto."""

    name: str
    after: str | None = None
    offset: int | None = None
    drop_previous_output: bool = False
    replace: bool = False
    # As an admission of this turn has reported them.
    conversation_ids: tuple[int, ...] = ()
    # Whether a scheduler without the session refuses the turn, also if it could go on there.
    only_in_session: bool = False


@dataclass(frozen=True, slots=True)
class SessionWish:
    """A request to open a session for a view. None: the scheduler chooses the value."""

    view: View
    session: str
    capacity_tokens: int | None = None
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The capacity of an opened session, and how long it waits for its next turn."""

    capacity_tokens: int
    timeout_ms: int


class GroupRole(Enum):
    """Role of a scheduler group: it computes prompts for others, serves requests, or does both by itself."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


# Output for which a group should have room when a request comes to it, unless the request may generate less. Answers of
# chats are rarely longer, and a request's maximum is mostly far above what it generates.
EXPECTED_OUTPUT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class RoleSignals:
    """The part of a group's load by which tokenizers change roles, and place sessions.

    `may_change`: a wish for another role would be followed. `is_changing`: one is, and the group takes no requests.
    `waited_s`: how long the oldest request has waited that lacks a row, memory or room in a step. `fullness`: share of
    the rows that run, or of the pages that they hold, whichever is larger. `own_role`: that of the settings, which
    it has after a restart, and by which sessions are placed. `follows_load`: the load may change its role; otherwise,
    only the last two are of use.
    """

    may_change: bool
    is_changing: bool
    waited_s: float
    fullness: float
    own_role: GroupRole = GroupRole.BOTH
    follows_load: bool = True


@dataclass(frozen=True, slots=True)
class RoleWish:
    """A tokenizer's wish that a group computes prompts for others (PREFILL), or generates (DECODE), and why."""

    role: GroupRole
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of a scheduler: choices that wait or run, and whether a request submitted now would run; its role.

    If its workers sleep, a request would wait for them to be woken. `free_tokens` is the room for KV in tokens, beside
    what open requests hold and are expected to need; None: not known. `signals`; None: its role is fixed, and that of
    its settings, and it has no sessions.
    """

    open_choices: int
    serves: bool
    sleeps: bool = False
    role: GroupRole = GroupRole.BOTH
    free_tokens: int | None = None
    signals: RoleSignals | None = None


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The gateway subscription that receives a request's output, and the detokenizer that serves it."""

    subscriber_id: SubscriberId
    detokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context headers of one request.

    `traceparent` names the request's own span. `parent_id` is the client's, if it has one; only the gateway knows it.
    """

    traceparent: str
    tracestate: str | None = None
    parent_id: str | None = None


class ToolStyle(Enum):
    """How a model writes tool calls; see `ToolStyle` in protos/pando/v1/tokenizer.proto."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    MISTRAL_ARGS = "mistral_args"
    QWEN3_CODER = "qwen3_coder"
    GLM = "glm"
    GLM47 = "glm47"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    KIMI_K2 = "kimi_k2"
    MINIMAX = "minimax"
    MINIMAX_M1 = "minimax_m1"
    GRANITE = "granite"
    GEMMA = "gemma"
    HARMONY = "harmony"
    SEED = "seed"


class ReasoningStyle(Enum):
    """How a model marks its reasoning; see `ReasoningStyle` in protos/pando/v1/tokenizer.proto."""

    THINK = "think"
    BRACKETS = "brackets"
    RESPONSE = "response"
    SEED = "seed"
    KIMI = "kimi"
    GEMMA = "gemma"
    HARMONY = "harmony"


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(Enum):
    """Causes of a failure, stable across versions; `common/errors.py` maps them to gRPC status and HTTP status."""

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
    """The error that ended a request, as a value: streams that many requests share cannot raise it."""

    code: ErrorCode
    message: str
    param: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None
    # Failures of the engine while it computed the request; the next submission of it carries their number.
    engine_failures: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice; there is exactly one. `error` is set if and only if the reason is ERROR.

    `embedding` is the result of a pooling request: little-endian float32, an embedding of any length or outputs of the
    model's classification head, those of several tokens token by token.
    """

    reason: FinishReason
    matched_token_id: int | None = None
    matched_text: str | None = None
    error: RequestFailure | None = None
    embedding: bytes | None = None
    # Tokens drafted from the request's prediction that were accepted, and those that were not.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities of a sampled token, of the most likely ids (best first) and of the requested ids."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to one submitted request: accepted if `rejected` is None."""

    request_id: RequestId
    prompt_tokens: int
    rejected: RequestFailure | None = None
    # The prompt, if the request asks for it; only from the tokenizer.
    prompt_ids: tuple[int, ...] = ()
    # The tokens that a session has prepended to the prompt, without images among them; only from the scheduler.
    conversation_ids: tuple[int, ...] = ()
    # Rejected, as the request names images whose content is not kept any more: it has to be sent with that.
    lacks_images: bool = False
    # Whether the next requests of the view may name its images without their content.
    keeps_images: bool = False
    # Rejected, as this scheduler has no such session, or not the turn to continue; only from the scheduler.
    lacks_session: bool = False


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The part of a request that gateway, tokenizer and scheduler share; `common/wire/requests.py` converts it."""

    sampling: SamplingParams = SamplingParams()
    stop: StopConditions = StopConditions()
    # Number of choices.
    n: int = 1
    priority: int = 0
    cache_mode: CacheMode = CacheMode.DEFAULT
    skip_special_tokens: bool = True
    resume: Resume | None = None
    timeout_ms: int | None = None
    trace: TraceContext | None = None
    # Name of the session, unique within the view.
    session: str | None = None
    turn: SessionTurn | None = None
    max_context_tokens: int | None = None
    # If set, nothing is generated.
    pooling: Pooling | None = None
    prompt_logprobs: PromptLogprobs | None = None
    # Name of the adapter; empty: the base model.
    adapter: str = ""
    # Failures of the engine that schedulers which handed the request back suspect it of.
    engine_failures: int = 0
    # A line of a batch: served only while no other request is open.
    is_batch: bool = False
    # A budget is nearly used up: `throttled_weight` counts from now on.
    tenant_is_throttled: bool = False
    subject_is_throttled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PackedPixels:
    """Pixels of an image in 8 bits, which take a quarter of float32's room, or less with several frames.

    `values` uint8 [parts, channels, pixels of a part] stand for the numbers in `table` float32 [channels, 256]; each
    part is taken `frames` times, one after the other, and `shape` is that of the result.
    """

    values: NDArray[np.uint8]
    table: NDArray[np.float32]
    frames: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The room that they take."""
        return int(self.values.nbytes)

    def __post_init__(self) -> None:
        """Raise ValueError if the parts do not fit together."""
        channels = self.values.shape[1]
        if self.table.shape != (channels, 256) or self.values.size * self.frames != math.prod(self.shape):
            raise ValueError(f"packed values {self.values.shape} of pixels of the shape {self.shape}")

    def unpacked(self) -> NDArray[np.float32]:
        """Return the pixels as the model's processor makes them."""
        channels = np.arange(len(self.table))[None, :, None]
        numbers = self.table[channels, self.values]
        return np.repeat(numbers[:, :, None], self.frames, axis=2).reshape(self.shape)


Pixels: TypeAlias = "NDArray[np.float32] | PackedPixels"


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row: the first `length` ids below 0 from index `offset` on stand where its embeddings belong.

    `grid` is the model's own: patches in time, height and width (Qwen), or rows and columns of tiles (Idefics). Of a
    video for Qwen2.5-VL, the coordinate of each step in time follows.
    `pixels` are float32, as the model's processor makes them, or packed. Without them, either all of the image's tokens
    are computed, or the worker has kept its embeddings as `output`. With pixels, `output` is where the worker keeps the
    embeddings once they are encoded, or where it finds them if it has kept those already.
    """

    digest: bytes
    offset: int
    length: int
    grid: tuple[int, ...]
    pixels: Pixels | None = None
    output: EncoderOutputId | None = None


def pixel_bytes(images: Iterable[RowImage]) -> int:
    """Return the bytes of the pixels of images."""
    return sum(image.pixels.nbytes for image in images if image.pixels is not None)


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """An encoded, validated request on its way to the scheduler."""

    request_id: RequestId
    view: View
    reply_to: ReplyTo
    token_ids: TokenIds
    options: RequestOptions = RequestOptions()
    # Key by which the tokenizer chooses one of several scheduler groups; not sent to schedulers.
    routing_key: str | None = None
    # Of a pair of texts: position of the second one's first token, for encoders that mark the tokens of each.
    second_text_start: int | None = None
    # Address of the scheduler of a group that may compute the prompt; empty: there is none.
    prefill_group: str = ""
    # Name that the certificate of that group must have; empty: the address's host.
    prefill_group_name: str = ""
    # Tokens that the output may repeat parts of, as a source of drafts.
    prediction_ids: tuple[int, ...] = ()
    # In the order of the prompt; their embeddings belong where ids are below 0. A tokenizer leaves out the pixels that
    # the scheduler keeps, which adds them before all else.
    images: tuple[RowImage, ...] = ()

    @property
    def may_keep_images(self) -> bool:
        """Whether it has images, which are kept for its view, and found in it."""
        return bool(self.images) and self.options.cache_mode is not CacheMode.NONE
