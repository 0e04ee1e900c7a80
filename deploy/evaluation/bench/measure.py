"""The connection to a server under test, and the loads against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deploy.evaluation.bench.client import OpenAIClient, RequestTemplate
from deploy.evaluation.bench.clock import Clock, SystemClock
from deploy.evaluation.bench.load import run_closed_loop, run_open_loop
from deploy.evaluation.bench.prompts import DEFAULT_VOCABULARY, PromptMaker
from deploy.evaluation.bench.target import TargetError, accepts_ids, find_model, measure_tokens_per_word, open_client
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deploy.evaluation.bench.records import LoadResult, RequestRecord, WorkloadSession
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
