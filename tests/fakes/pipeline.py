"""A pipeline in one process: it answers each request by a script, and can lose requests on command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.adapters import AdapterInfo
from common.deltas import Delta, LogprobText, PromptUsage, TokenText
from common.errors import InvalidRequestError
from common.requests import ChatPrompt, GenerateRequest
from common.types import (
    Admission,
    Finish,
    FinishReason,
    RequestFailure,
    RequestId,
    SessionGrant,
    SessionWish,
    Subject,
    ToolStyle,
    View,
)
from gateway.pipeline.port import (
    CacheChanges,
    FallenAsleep,
    LoadedAdapter,
    ModelInfo,
    SleepState,
    Tokenization,
    WeightsUpdated,
)

if TYPE_CHECKING:
    from common.errors import PandoError
    from gateway.pipeline.port import Listener, ScheduledRequest, SleepWish, WeightsUpdate

Event = Admission | Delta
Script = Callable[[GenerateRequest], Iterable[Event]]

STOP = Finish(FinishReason.STOP)
LENGTH = Finish(FinishReason.LENGTH)
PROMPT = PromptUsage(prompt_tokens=7, cached_tokens=4)
# [0, 1] in float32.
EMBEDDING = b"\x00\x00\x00\x00\x00\x00\x80\x3f"
CARD = ModelInfo(
    "tiny", 2048, 1_114_112, has_chat_template=True, created_unix_s=1_700_000_000, tool_style=ToolStyle.HERMES
)


class FakePipeline:
    """Implements `Pipeline`. Without a script requests stay open until the test tells their listeners."""

    def __init__(self, script: Script | None = None, pause_s: float = 0.0) -> None:
        self.script = script
        self.pause_s = pause_s
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[RequestId] = []
        self.listeners: dict[RequestId, Listener] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted = asyncio.Event()

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        self.submitted.append(request)
        self.listeners[request.request_id] = listener
        self._submitted.set()
        if self.script is not None:
            task = asyncio.get_running_loop().create_task(self._play(request, self.script))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def submissions(self, count: int) -> list[GenerateRequest]:
        """Wait until so many requests have been submitted, and return them."""
        async with asyncio.timeout(30):
            while len(self.submitted) < count:
                self._submitted.clear()
                await self._submitted.wait()
        return self.submitted

    def abort(self, request_id: RequestId) -> None:
        if self.listeners.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def tell(self, event: Event) -> None:
        """Pass an event to whoever listens for its request, as the real pipeline does: unknown ids are dropped."""
        listener = self.listeners.get(event.request_id)
        if listener is None:
            return
        if isinstance(event, Delta):
            listener.on_delta(event)
        else:
            listener.on_admission(event)

    def lose(self, request_id: RequestId, failure: RequestFailure) -> None:
        """Let the connection break that the request depended on."""
        self.listeners.pop(request_id).on_lost(request_id, failure)

    async def _play(self, request: GenerateRequest, script: Script) -> None:
        for event in script(request):
            await asyncio.sleep(self.pause_s)
            self.tell(event)


def says(
    *words: str, finish: Finish = STOP, usage: PromptUsage = PROMPT, logprobs: Sequence[LogprobText] = ()
) -> Script:
    """A script that gives every choice one token per word, and continues where a resumed request stopped."""

    def script(request: GenerateRequest) -> Iterable[Event]:
        ids = tuple(range(usage.prompt_tokens)) if request.returns_prompt_ids else ()
        yield Admission(request.request_id, usage.prompt_tokens, prompt_ids=ids)
        if request.options.pooling is not None:
            embedded = Finish(FinishReason.STOP, embedding=EMBEDDING)
            yield Delta(request.request_id, 0, 0, (), "", prompt_usage=usage, finish=embedded)
            return
        resume = request.options.resume
        first = len(resume.token_ids) if resume else 0
        wants_logprobs = request.options.sampling.top_logprobs is not None
        for number, word in enumerate(words[first:], start=first):
            for choice in range(request.options.n):
                yield Delta(
                    request.request_id,
                    choice,
                    first_token_index=number,
                    token_ids=(1000 + number,),
                    text=word,
                    logprobs=tuple(logprobs[number : number + 1]) if wants_logprobs else (),
                    prompt_usage=usage if number == first else None,
                    finish=finish if number == len(words) - 1 else None,
                )

    return script


def rejects(failure: RequestFailure) -> Script:
    """A script that refuses every request."""
    return lambda request: [Admission(request.request_id, 0, failure)]


def logprob(text: str, value: float, *others: tuple[str, float]) -> LogprobText:
    """A token with its alternatives."""
    top = [TokenText(number, other, word.encode()) for number, (word, other) in enumerate(others)]
    return LogprobText(TokenText(0, value, text.encode()), tuple(top))


@dataclass
class FakeModel:
    """Implements `gateway.pipeline.port.Model`: a token is a character's code point."""

    card: ModelInfo = CARD
    error: PandoError | None = None
    questions: int = 0
    sessions: dict[tuple[View, str], SessionWish] = field(default_factory=dict)
    # For whom texts were encoded and decoded.
    subjects: list[Subject] = field(default_factory=list)
    rendered: list[ChatPrompt] = field(default_factory=list)

    async def get_model(self) -> ModelInfo:
        self.questions += 1
        self._check()
        return self.card

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> Tokenization:
        self._check()
        self.subjects.append(subject)
        start = "\x02" if add_special_tokens else ""
        return Tokenization(tuple(map(ord, start + text)), tuple(start + text))

    async def detokenize(self, subject: Subject, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        self._check()
        self.subjects.append(subject)
        if max(ids, default=0) > sys.maxunicode:
            raise InvalidRequestError("tokens: an id is outside the vocabulary", param="tokens")
        text = "".join(chr(token) for token in ids if not (skip_special_tokens and token == 2))
        return text.encode(errors="replace").decode()

    async def render_chat(self, subject: Subject, chat: ChatPrompt) -> Tokenization:
        self._check()
        self.subjects.append(subject)
        self.rendered.append(chat)
        text = "".join(f"<{message.role}>{message.content}" for message in chat.messages)
        return Tokenization(tuple(map(ord, text)))

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        self._check()
        if (wish.view, wish.session) in self.sessions:
            raise InvalidRequestError("open already", param="session_id")
        self.sessions[wish.view, wish.session] = wish
        return SessionGrant(wish.capacity_tokens or 1024, wish.timeout_ms or 600_000)

    async def close_session(self, view: View, session: str) -> bool:
        self._check()
        return self.sessions.pop((view, session), None) is not None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class FakeReadiness:
    """Implements `gateway.pipeline.port.Readiness`."""

    lacking: list[str] = field(default_factory=list)

    async def missing(self) -> list[str]:
        return self.lacking


@dataclass
class FakeAdministration:
    """Implements `gateway.pipeline.port.Administration`."""

    flushes: int = 0
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    asked: list[tuple[tuple[RequestId, ...], Subject]] = field(default_factory=list)
    detailed: list[dict[str, object]] = field(default_factory=list)
    changes: list[CacheChanges] = field(default_factory=list)
    listings: int = 0
    loaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    updates: list[WeightsUpdate] = field(default_factory=list)
    wishes: list[SleepWish] = field(default_factory=list)
    woken: list[tuple[str, ...]] = field(default_factory=list)
    sleep_level: int = 0
    wakes_on_request: bool = False
    refusal: PandoError | None = None

    async def flush_cache(self) -> int:
        self.flushes += 1
        return 42

    async def update_weights(self, update: WeightsUpdate) -> list[WeightsUpdated]:
        self.updates.append(update)
        if self.refusal is not None:
            raise self.refusal
        return [WeightsUpdated(update.version or "1", 3, 0.25, beside=True)]

    async def sleep(self, wish: SleepWish) -> list[FallenAsleep]:
        if self.refusal is not None:
            raise self.refusal
        self.wishes.append(wish)
        self.sleep_level = wish.level
        return [FallenAsleep(2, 1000, 0.5), FallenAsleep(1, 500, 1.5)]

    async def wake_up(self, parts: Sequence[str]) -> bool:
        self.woken.append(tuple(parts))
        if not parts:
            self.sleep_level = 0
        return not parts

    async def sleep_states(self) -> list[SleepState]:
        return [SleepState(self.sleep_level, self.wakes_on_request)]

    async def states(self) -> list[dict[str, object]]:
        return [{"running_rows": 0, "weight_version": "default"}]

    async def timelines(self, request_ids: Sequence[RequestId], subject: Subject) -> list[ScheduledRequest]:
        self.asked.append((tuple(request_ids), subject))
        return self.scheduled

    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        return self.detailed

    async def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        for change in self.changes:
            yield change

    async def load_adapter(self, name: str, source: str, *, pinned: bool) -> AdapterInfo:
        if source == "wrong":
            raise InvalidRequestError("no adapter there", param="lora_path")
        self.loaded[name] = LoadedAdapter(AdapterInfo(name, source, "d1ge57", pinned, 8, 100))
        return self.loaded[name].info

    async def unload_adapter(self, name: str) -> bool:
        return self.loaded.pop(name, None) is not None

    async def adapters(self) -> list[LoadedAdapter]:
        self.listings += 1
        return list(self.loaded.values())
