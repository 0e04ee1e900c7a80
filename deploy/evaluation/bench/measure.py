"""Loads against a server under test: sessions in a closed loop (N at a time) or an open loop (each at its time)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deploy.evaluation.bench.client import OpenAIClient, RequestTemplate
from deploy.evaluation.bench.clock import Clock, SystemClock
from deploy.evaluation.bench.prompts import DEFAULT_VOCABULARY, PromptMaker
from deploy.evaluation.bench.records import LoadResult
from deploy.evaluation.bench.target import TargetError, accepts_ids, find_model, measure_tokens_per_word, open_client
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deploy.evaluation.bench.records import BenchRequest, RequestRecord, WorkloadSession
    from deploy.evaluation.bench.transport import HttpClient


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """A server's address, and the form of requests to it."""

    url: str
    model: str | None = None
    """None: the first in the server's list."""
    api_key: str | None = None
    endpoint: str = "completions"
    prompt_form: str = "auto"
    """ids, text, or auto: ids if the server accepts them."""
    vocabulary: int = DEFAULT_VOCABULARY
    temperature: float = 0.0
    ignore_eos: bool = True
    user_field: str | None = "user"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server under test."""

    model: str
    prompt_form: str
    """ids or text, as decided."""
    client: OpenAIClient
    http: HttpClient
    clock: Clock

    @classmethod
    async def connect(cls, options: TargetOptions, clock: Clock | None = None) -> ServerUnderTest:
        """Determine the server's model and the form of prompts that it accepts.

        Raises:
            TargetError: there is no server, or it cannot be measured.
        """
        clock = clock or SystemClock()
        http = open_client(options.url, options.api_key)
        model = options.model or await find_model(http)
        as_ids = await _takes_ids(http, model, options)
        per_word = 1.0 if as_ids else await measure_tokens_per_word(http, model)
        prompts = PromptMaker(options.seed, as_ids=as_ids, vocabulary=options.vocabulary, tokens_per_word=per_word)
        request_options = RequestTemplate(
            model=model,
            endpoint=options.endpoint,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            user_field=options.user_field,
            extra_body=options.extra_body,
            timeout_s=options.timeout_s,
        )
        client = OpenAIClient(http, prompts, request_options, clock)
        return cls(model, "ids" if as_ids else "text", client, http, clock)

    async def warm_up(self, count: int, concurrency: int, input_tokens: int, output_tokens: int) -> None:
        """Send requests that are not measured.

        Raises:
            TargetError: a request failed, as those of the load probably would.
        """
        sessions = random_sessions(count, input_tokens, output_tokens, name="warm-up")
        result = await run_closed_loop(self.client, sessions, concurrency, self.clock)
        for record in result.records:
            if record.error is not None:
                raise TargetError(f"warm-up failed: {record.error}: {record.message}")

    async def closed_loop(
        self,
        sessions: Sequence[WorkloadSession],
        concurrency: int,
        on_record: Callable[[RequestRecord], None] = lambda _record: None,
    ) -> LoadResult:
        """Play `sessions`, `concurrency` at a time."""
        return await run_closed_loop(self.client, sessions, concurrency, self.clock, on_record)

    async def open_loop(
        self, sessions: Sequence[WorkloadSession], on_record: Callable[[RequestRecord], None] = lambda _record: None
    ) -> LoadResult:
        """Play each of `sessions` at its arrival time."""
        return await run_open_loop(self.client, sessions, self.clock, on_record)

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()


async def _takes_ids(http: HttpClient, model: str, options: TargetOptions) -> bool:
    if options.endpoint == "chat" or options.prompt_form == "text":
        return False
    return options.prompt_form == "ids" or await accepts_ids(http, model)


class Sender(Protocol):
    """Sends requests and records their responses."""

    async def send(self, request: BenchRequest, late_s: float = 0.0) -> RequestRecord:
        """Send `request` and return its record; never raises for a failed request."""
        ...


def _ignore(_record: RequestRecord) -> None:
    pass


async def run_closed_loop(
    sender: Sender,
    sessions: Sequence[WorkloadSession],
    concurrency: int,
    clock: Clock,
    on_record: Callable[[RequestRecord], None] = _ignore,
) -> LoadResult:
    """Play all sessions in order, `concurrency` at a time."""
    player = _Player(sender, clock, on_record)
    waiting = iter(sessions)

    async def play_next() -> None:
        for session in waiting:
            await player.play(session)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(sessions))):
            tasks.create_task(play_next())
    return player.result()


async def run_open_loop(
    sender: Sender,
    sessions: Sequence[WorkloadSession],
    clock: Clock,
    on_record: Callable[[RequestRecord], None] = _ignore,
) -> LoadResult:
    """Start each session at its arrival time, independently of the number of open ones."""
    player = _Player(sender, clock, on_record)
    start = clock.now()
    async with asyncio.TaskGroup() as tasks:
        for session in sorted(sessions, key=lambda session: session.arrival_s or 0.0):
            due = start + (session.arrival_s or 0.0)
            await clock.sleep(due - clock.now())
            tasks.create_task(player.play(session, due))
    return player.result()


class _Player:
    """Plays sessions and collects the records."""

    def __init__(self, sender: Sender, clock: Clock, on_record: Callable[[RequestRecord], None]) -> None:
        self._sender = sender
        self._clock = clock
        self._on_record = on_record
        self._records: list[RequestRecord] = []

    async def play(self, session: WorkloadSession, due: float | None = None) -> None:
        """Send the requests of a session one after the other; a failure ends the session, as in a real conversation."""
        for request in session.requests:
            await self._clock.sleep(request.delay_s)
            late = max(0.0, self._clock.now() - due - request.delay_s) if due is not None else 0.0
            due = None
            record = await self._sender.send(request, late)
            self._records.append(record)
            self._on_record(record)
            if record.error is not None:
                return

    def result(self) -> LoadResult:
        if not self._records:
            return LoadResult((), 0.0)
        first = min(record.started_s for record in self._records)
        last = max(record.ended_s for record in self._records)
        return LoadResult(tuple(self._records), last - first)
