"""Sends prompts to a server under one identity or another, and records what the sender observes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from deploy.evaluation.bench.client import OpenAIClient, RequestTemplate
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.target import accepts_ids, base_url, find_model, measure_tokens_per_word
from deploy.evaluation.bench.transport import HttpClient, TransportError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence

    from deploy.evaluation.attack.allowance import Allowance
    from deploy.evaluation.attack.pictures import Picture
    from deploy.evaluation.bench.clock import Clock
    from deploy.evaluation.bench.records import RequestRecord

QUESTION_TOKENS = 8
# The lowest that a request may have; it counts where the waiting queue is ordered by priority.
LOWEST_PRIORITY = -(2**31) + 1


class AttackError(Exception):
    """The server cannot be attacked; the message says why, for people."""


# As `Disguise.api_key`: the request carries no credential at all.
NO_KEY = ""


COMPLETIONS, MESSAGES = "completions", "messages"
# After a picture, before a question that only one asks: longer than a page, so that the picture is in whole pages.
COMMON_QUESTION = (
    " Please look at this picture closely, and say in one short sentence what can be seen in it, where that is, and "
    "what colours it has, without any guess about what is outside of it. "
)


JSON_TIMEOUT_S = 300.0


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Disguise:
    """The identity of a request: body fields, headers, and the credential.

    `api_key` None means the prober's own key, `NO_KEY` none. `endpoint` is completions, chat or messages.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    endpoint: str = COMPLETIONS


@dataclass(frozen=True, slots=True)
class Sighting:
    """The observation of one request by its sender; times in seconds of one clock."""

    cached_tokens: int | None
    first_token_s: float
    """From sending."""
    first_token_at: float
    ended_at: float
    packets: int = 1
    """Parts in which the output came."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A greedy answer of a few tokens."""

    text: str
    cached_tokens: int


class Prober:
    """One server over HTTP. Most requests ask for a single token, which is all that an attacker needs."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str,
        prompts: PromptMaker,
        clock: Clock,
        allowance: Allowance | None = None,
    ) -> None:
        """Ask `model` at `url` with the texts of `prompts`; within an `allowance`, at the lowest priority."""
        self.model = model
        self.clock = clock
        self._url = url
        self._api_key = api_key
        self._prompts = prompts
        self._clients: dict[tuple[str | None, tuple[tuple[str, str], ...]], HttpClient] = {}
        self._asked = 0
        self._allowance = allowance
        self._priority = {} if allowance is None else {"priority": LOWEST_PRIORITY}

    @classmethod
    async def connect(
        cls, url: str, api_key: str | None, seed: int, clock: Clock, allowance: Allowance | None = None
    ) -> Prober:
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
        return cls(url, api_key, model, PromptMaker(seed, as_ids=as_ids, tokens_per_word=per_word), clock, allowance)

    async def ask(self, text: tuple[Segment, ...], user: str) -> Sighting:
        """Ask about `text` as `user`, with a question of its own.

        Raises:
            AttackError: no answer.
        """
        return await self.ask_as(text, Disguise({"user": user}))

    async def ask_at_once(self, asked: Sequence[tuple[tuple[Segment, ...], str]]) -> list[Sighting]:
        """Send texts of users in this order without waiting for answers; return the observation of each."""
        return await self.ask_at_once_as([(text, Disguise({"user": user})) for text, user in asked])

    async def ask_at_once_as(self, asked: Sequence[tuple[tuple[Segment, ...], Disguise]]) -> list[Sighting]:
        """Send texts under several identities in this order without waiting for answers."""
        return await at_once(self.ask_as(text, disguise) for text, disguise in asked)

    async def ask_as(self, text: tuple[Segment, ...], disguise: Disguise, *, output_tokens: int = 1) -> Sighting:
        """Ask about `text` under another identity.

        Raises:
            AttackError: no answer, for example because the server refuses the identity.
        """
        self._asked += 1
        asked = with_question(text, str(self._asked))
        if disguise.endpoint == MESSAGES:
            assert output_tokens == 1, "long outputs are asked for as completions"
            return await self._ask_message(asked, disguise)
        return await self.ask_exactly(asked, disguise, output_tokens=output_tokens)

    async def ask_exactly(self, text: tuple[Segment, ...], disguise: Disguise, *, output_tokens: int) -> Sighting:
        """Ask about `text` without a question of one's own, so that the same text has the same answer.

        Raises:
            AttackError: no answer.
        """
        await self._take()
        fields = {**self._priority, **disguise.fields}
        options = RequestTemplate(self.model, disguise.endpoint, user_field=None, extra_body=fields)
        client = OpenAIClient(self._client(disguise), self._prompts, options, self.clock)
        return _sighting(await client.send(BenchRequest(text, output_tokens=output_tokens)))

    async def complete(self, text: tuple[Segment, ...], user: str, tokens: int) -> ProbeAnswer:
        """Return the greedy answer to exactly `text`, so that two servers can be compared.

        Raises:
            AttackError: no answer.
        """
        body = {
            "model": self.model,
            "prompt": self._prompts.prompt(text),
            "user": user,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": True,
            **self._priority,
        }
        answer = await self._post("/v1/completions", body, Disguise())
        try:
            return ProbeAnswer(
                answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
            )
        except (KeyError, IndexError, TypeError):
            raise AttackError("an answer lacks its text or the count of cached tokens") from None

    async def sees_pictures(self, picture: Picture) -> bool:
        """Return whether the model takes pictures.

        Raises:
            AttackError: no answer.
        """
        await self._take()
        body = self._picture_body(picture, "", Disguise())
        status, _ = await self._exchange("POST", "/v1/chat/completions", orjson.dumps(body), Disguise())
        return status == 200

    async def ask_about(self, picture: Picture, disguise: Disguise, *, before: str = "") -> Sighting:
        """Ask about a picture in a chat, after the text `before`, with a question of its own.

        Raises:
            AttackError: no answer.
        """
        await self._take()
        self._asked += 1
        body = self._picture_body(picture, before, disguise)
        started = self.clock.now()
        answer = await self._post("/v1/chat/completions", body, disguise)
        ended = self.clock.now()
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Sighting(details.get("cached_tokens"), ended - started, ended, ended)

    async def get(self, path: str, disguise: Disguise) -> tuple[int, bytes]:
        """Return status and body of a page.

        Raises:
            AttackError: no answer.
        """
        return await self._exchange("GET", path, b"", disguise)

    async def post(self, path: str, body: Mapping[str, object], disguise: Disguise) -> tuple[int, bytes]:
        """Return status and body of the answer to a JSON body with the identity's fields.

        Raises:
            AttackError: no answer.
        """
        return await self._exchange("POST", path, orjson.dumps({**body, **disguise.fields}), disguise)

    async def close(self) -> None:
        """Close all connections."""
        for http in self._clients.values():
            await http.aclose()

    def _client(self, disguise: Disguise) -> HttpClient:
        api_key = self._api_key if disguise.api_key is None else disguise.api_key
        identity = api_key, tuple(sorted(disguise.headers.items()))
        if identity not in self._clients:
            self._clients[identity] = open_connection(self._url, api_key, disguise.headers)
        return self._clients[identity]

    def _picture_body(self, picture: Picture, before: str, disguise: Disguise) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
        content.append({"type": "image_url", "image_url": {"url": picture.data_url()}})
        content.append({"type": "text", "text": f"{COMMON_QUESTION}{self._asked}"})
        messages = [{"role": "user", "content": content}]
        options = {"model": self.model, "max_tokens": 1, "temperature": 0, **self._priority}
        return {**options, "messages": messages, **disguise.fields}

    async def _ask_message(self, text: tuple[Segment, ...], disguise: Disguise) -> Sighting:
        body = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0,
            "messages": self._prompts.messages(text),
            **disguise.fields,
        }
        started = self.clock.now()
        answer = await self._post("/v1/messages", body, disguise)
        ended = self.clock.now()
        return Sighting((answer.get("usage") or {}).get("cache_read_input_tokens"), ended - started, ended, ended)

    async def _post(self, path: str, body: Mapping[str, Any], disguise: Disguise) -> Any:
        payload = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        status, answer = await self._exchange("POST", path, payload, disguise)
        if status != 200:
            raise AttackError(f"a request failed: {path} answered {status}: {answer[:200].decode(errors='replace')}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError:
            raise AttackError(f"{path} answered something that is no JSON") from None

    async def _take(self) -> None:
        if self._allowance is not None:
            await self._allowance.take()

    async def _exchange(self, method: str, path: str, body: bytes, disguise: Disguise) -> tuple[int, bytes]:
        await self._take()
        try:
            response = await self._client(disguise).request(method, path, body, timeout_s=JSON_TIMEOUT_S)
        except TransportError as error:
            raise AttackError(f"a request failed: {error.kind}: {error}") from None
        return response.status, response.body


async def at_once(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Do independent pieces of work at the same time; return their results in order.

    Raises:
        AttackError: the first that failed; the others are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(piece) for piece in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def open_connection(url: str, api_key: str | None, headers: Mapping[str, str] | None = None) -> HttpClient:
    """Return a client with a credential and further headers."""
    credential = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return HttpClient(url, {**credential, **(headers or {})})


def _sighting(record: RequestRecord) -> Sighting:
    if record.error is not None:
        raise AttackError(f"a request failed: {record.error}: {record.message}")
    if record.time_to_first_s is None:
        raise AttackError("a request ended without output")
    chunks = record.chunks_s
    return Sighting(record.cached_tokens, record.time_to_first_s, chunks[0], record.ended_s, len(chunks))


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """Prompts of equal length: `tokens` that somebody may hold, then a question of the asker's own.

    Only whole pages match, so a slot is a page: the least that can be guessed at once.
    """

    page_tokens: int = 16
    tokens: int = 64

    def document(self, name: str) -> tuple[Segment, ...]:
        """Return a private document, like no other from its first token on."""
        return (Segment(f"document/{name}", self.tokens),)

    def filled(self, template: str, secret: str, tokens: int | None = None) -> tuple[Segment, ...]:
        """Return a template that everybody knows, filled with a secret: only the slot's page is unknown."""
        rest = (tokens or self.tokens) - self.head_tokens - self.page_tokens
        return (*self.head(template), Segment(f"slot/{secret}", self.page_tokens), Segment(f"rest/{template}", rest))

    def head(self, template: str) -> tuple[Segment, ...]:
        """Return a template up to its slot."""
        return (Segment(f"head/{template}", self.head_tokens),)

    @property
    def head_tokens(self) -> int:
        """Length of a template up to its slot: whole pages."""
        return max(self.tokens // 2 // self.page_tokens, 1) * self.page_tokens


def with_question(text: tuple[Segment, ...], name: str) -> tuple[Segment, ...]:
    """Return a text with a question that only `name` asks, as no prompt is found in a cache to its last token."""
    return (*text, Segment(f"question/{name}", QUESTION_TOKENS))
