"""Asks a server as one principal or another, and notes what the asker sees."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.attack.texts import with_question
from deploy.bench.client import OpenAIClient, RequestOptions
from deploy.bench.prompts import PromptMaker
from deploy.bench.records import BenchRequest
from deploy.bench.target import accepts_ids, base_url, find_model, measure_tokens_per_word
from deploy.bench.transport import HttpClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deploy.bench.clock import Clock
    from deploy.bench.records import RequestRecord, Segment


class AttackError(Exception):
    """The server cannot be attacked; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class Disguise:
    """How an asker names itself: body fields, and headers beside the credential."""

    fields: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the asker of one prompt sees. Seconds of one clock."""

    cached_tokens: int | None
    first_token_s: float
    """From sending."""
    first_token_at: float


class Prober:
    """One server, asked over HTTP with a single token of output, which is all that an attacker needs."""

    def __init__(self, url: str, api_key: str | None, model: str, prompts: PromptMaker, clock: Clock) -> None:
        """Ask `model` at `url` with the texts of `prompts`."""
        self.model = model
        self.clock = clock
        self._url = url
        self._api_key = api_key
        self._prompts = prompts
        self._clients: dict[str | None, HttpClient] = {}
        self._disguised: list[HttpClient] = []
        self._asked = 0

    @classmethod
    async def connect(cls, url: str, api_key: str | None, seed: int, clock: Clock) -> Prober:
        """Find out what is served at `url`.

        Raises:
            TargetError: nothing there that could be asked.
        """
        url = base_url(url)
        http = open_connection(url, api_key)
        try:
            model = await find_model(http)
            as_ids = await accepts_ids(http, model)
            per_word = 1.0 if as_ids else await measure_tokens_per_word(http, model)
        finally:
            await http.aclose()
        return cls(url, api_key, model, PromptMaker(seed, as_ids=as_ids, tokens_per_word=per_word), clock)

    async def ask(self, text: tuple[Segment, ...], user: str) -> Sighting:
        """Ask about `text` as `user`, with a question of its own.

        Raises:
            AttackError: no answer.
        """
        return await self._ask(self._client(self._api_key), text, {"user": user})

    async def ask_at_once(self, asked: Sequence[tuple[tuple[Segment, ...], str]]) -> list[Sighting]:
        """Send texts of users in this order without waiting for answers; return what each of them saw."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(text, user)) for text, user in asked]
        return [task.result() for task in tasks]

    async def ask_as(self, text: tuple[Segment, ...], disguise: Disguise) -> Sighting:
        """Ask about `text` in a disguise.

        Raises:
            AttackError: no answer: the disguise is refused, for one.
        """
        http = open_connection(self._url, disguise.api_key or self._api_key, disguise.headers)
        self._disguised.append(http)
        return await self._ask(http, text, disguise.fields)

    async def close(self) -> None:
        """Close all connections."""
        for http in [*self._clients.values(), *self._disguised]:
            await http.aclose()

    def _client(self, api_key: str | None) -> HttpClient:
        if api_key not in self._clients:
            self._clients[api_key] = open_connection(self._url, api_key)
        return self._clients[api_key]

    async def _ask(self, http: HttpClient, text: tuple[Segment, ...], fields: Mapping[str, str]) -> Sighting:
        self._asked += 1
        request = BenchRequest(with_question(text, str(self._asked)), output_tokens=1)
        options = RequestOptions(self.model, user_field=None, extra_body=fields)
        return _sighting(await OpenAIClient(http, self._prompts, options, self.clock).send(request))


def open_connection(url: str, api_key: str | None, headers: Mapping[str, str] | None = None) -> HttpClient:
    """Return a client with a credential and further headers."""
    credential = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return HttpClient(url, {**credential, **(headers or {})})


def _sighting(record: RequestRecord) -> Sighting:
    if record.error is not None:
        raise AttackError(f"a request failed: {record.error}: {record.message}")
    if record.time_to_first_s is None:
        raise AttackError("a request ended without output")
    return Sighting(record.cached_tokens, record.time_to_first_s, record.chunks_s[0])
