"""The gateway's interfaces to the services, and the values that they return; `tests/fakes` has fakes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from common.heads import tasks_of
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from common.adapters import AdapterInfo
    from common.deltas import Delta
    from common.heads import Head, Task
    from common.requests import ChatPrompt, GenerateRequest, ImageLimits
    from common.types import (
        Admission,
        ReasoningStyle,
        RequestFailure,
        RequestId,
        SessionGrant,
        SessionWish,
        Subject,
        ToolStyle,
        View,
    )


class Listener(Protocol):
    """Receives the events of submitted requests. Called on the event loop; must not block."""

    def on_admission(self, admission: Admission) -> None:
        """The request was accepted, or rejected; after a rejection nothing follows."""

    def on_delta(self, delta: Delta) -> None:
        """A choice has new tokens, new text or its end."""

    def on_lost(self, request_id: RequestId, failure: RequestFailure) -> None:
        """A service became unavailable, and nothing more will come for this request.

        It may be submitted again under a new id. If it might still run, it has been aborted.
        """


class Pipeline(Protocol):
    """The pipeline: takes requests and reports their admissions and deltas to each request's listener."""

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request`; its listener is called for every event, including its loss, but never before this returns."""

    def abort(self, request_id: RequestId) -> None:
        """Remove the request and end it in all services, by its exact id; unknown ids are ignored."""


class Model(Protocol):
    """Calls about the served model, answered by the tokenizer.

    Every method raises a PandoError: the tokenizer's own, or UnavailableError if it is unavailable.
    """

    async def get_model(self) -> ModelInfo:
        """Return the served model's card."""

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> Tokenization:
        """Encode a text in the subject's fair share of the threads, as do the following two."""

    async def detokenize(self, subject: Subject, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        """Decode `ids` into text."""

    async def render_chat(self, subject: Subject, chat: ChatPrompt) -> Tokenization:
        """Apply the chat template and encode the result."""

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session at the scheduler that will get its requests."""

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session; return whether it was open."""


class Readiness(Protocol):
    """Reports whether a request would be served now."""

    async def missing(self) -> list[str]:
        """Return the missing services, each in a few words; empty when a request would be served."""


class Administration(Protocol):
    """Administrators' calls to the scheduler groups.

    Every method raises a PandoError: a scheduler's own, or UnavailableError if one is unavailable.
    """

    async def flush_cache(self) -> int:
        """Drop every cache entry that no running request needs; return the number of freed pages."""

    async def update_weights(self, update: WeightsUpdate) -> list[WeightsUpdated]:
        """Replace the weights of all groups, each of which keeps its weights if it cannot; return what each says."""

    async def sleep(self, wish: SleepWish) -> list[FallenAsleep]:
        """Put the workers of all groups to sleep; return what each says."""

    async def wake_up(self, parts: Sequence[str]) -> bool:
        """Restore parts of what the workers of all groups have given back, or all; return whether they are awake."""

    async def sleep_states(self) -> list[SleepState]:
        """Return whether the workers of each group sleep."""

    async def states(self) -> list[dict[str, object]]:
        """Return the statistics of each group's scheduler, as JSON."""

    async def timelines(self, request_ids: Sequence[RequestId], subject: Subject) -> list[ScheduledRequest]:
        """Return the schedulers' records of those of `request_ids` that are requests of `subject`."""

    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        """Like `states`, with open requests and the `max_owners` largest owners, by name; for administrators only.

        A group that does not answer has the fields `group` and `error`.
        """

    def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        """Yield a snapshot of each group's cache, then its changes, until closed; for administrators only."""

    async def load_adapter(self, name: str, source: str, *, pinned: bool) -> AdapterInfo:
        """Make an adapter available in all groups; without `source`, change its pin only."""

    async def unload_adapter(self, name: str) -> bool:
        """Make an adapter unavailable in all groups; return whether any had it."""

    async def adapters(self) -> list[LoadedAdapter]:
        """Return the adapters that all groups have, by name."""


@dataclass(frozen=True, slots=True)
class ScheduledMilestone:
    """One event of a choice in the scheduler, at `unix_s` seconds since 1970; see `Milestone` in scheduler.proto.

    `found` are the tokens that the cache held, by level and tier.
    """

    kind: str
    unix_s: float
    choice: int
    wait: str | None = None
    found: Mapping[str, int] | None = None
    finish_reason: str | None = None
    output_tokens: int = 0
    charged_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The milestones of one submitted request, in order of time."""

    request_id: str
    milestones: tuple[ScheduledMilestone, ...]


JsonObject: TypeAlias = "dict[str, object]"


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes of one group's cache. With `reset`, what is known of the group is void and a snapshot follows.

    Nodes are as `gateway.pipeline.cache_changes` describes them.
    """

    group: str
    reset: bool = False
    # Decisions from before the snapshot that follows, oldest first: each (age in ms, number, kind, node after it).
    past: list[tuple[int, int, str, JsonObject]] = field(default_factory=list)
    # Each (number, kind, node after it or None).
    events: list[tuple[int, str, JsonObject | None]] = field(default_factory=list)
    # Current hits and users of shared nodes, which change without events.
    counters: list[JsonObject] = field(default_factory=list)
    # Why the group cannot be watched now.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, and the groups in which it is on the device and rows use it."""

    info: AdapterInfo
    resident: int = 0
    running_rows: int = 0


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """Weights by the reference that names their files, and what becomes of the requests that run.

    `load_format` empty: that of the loaded weights. `version` empty: a number. `mode` is drain, recompute or abort.
    """

    model: str
    load_format: str = ""
    mode: str = "drain"
    version: str = ""


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """The name of the weights that a group serves, and the number of requests that ran when the update began.

    `paused_s` is the time in which none could run; `beside` says that the new weights were read before.
    """

    version: str
    running: int
    paused_s: float = 0.0
    beside: bool = False


@dataclass(frozen=True, slots=True)
class SleepWish:
    """The level of sleep, 1 or 2, what becomes of the requests that run, and whether the host tier keeps the cache.

    `mode` is drain, requeue or abort.
    """

    level: int = 1
    mode: str = "drain"
    keep_cache: bool = False


@dataclass(frozen=True, slots=True)
class FallenAsleep:
    """The number of requests that ran when a group was put to sleep, the memory that it gave back, and the time."""

    running: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SleepState:
    """The level at which a group's workers sleep, 0 for none, and whether a request wakes them."""

    level: int
    wakes_on_request: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model's name, limits and capabilities."""

    name: str
    max_context_tokens: int
    vocabulary_size: int
    has_chat_template: bool
    created_unix_s: int
    # None: the chat template does not support tools.
    tool_style: ToolStyle | None = None
    # None: the model marks no reasoning.
    reasoning_style: ReasoningStyle | None = None
    # Whether the prompt opens the reasoning: by itself, if the request asks for reasoning, and if it asks for none.
    begins_with_reasoning: bool = False
    begins_with_reasoning_on_request: bool = False
    begins_with_reasoning_although_off: bool = False
    reads_reasoning_effort: bool = False
    # Why requests with tools are refused.
    tools_problem: str | None = None
    # The model has no cache of keys and values, and does not generate.
    is_encoder: bool = False
    # The default pooling of embeddings.
    pooling: Pooling = Pooling.LAST
    embedding_dimensions: int = 0
    # The model is made for embeddings.
    only_embeds: bool = False
    # The model serves nothing but this classification head.
    head: Head | None = None
    # Texts that are put before those to embed, by name; and the name of the one for requests that name none.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    # None: the model takes no images.
    images: ImageLimits | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks of the model, the main one first."""
        return tasks_of(self.head, generates=not (self.is_encoder or self.only_embeds))


@dataclass(frozen=True, slots=True)
class Tokenization:
    """An encoded text; `tokens` are the vocabulary's entries, where the call returns them."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...] = ()

    def without_strings(self) -> Tokenization:
        """Return a copy that has the ids only."""
        return Tokenization(self.ids)
