"""Clients of the campaign: streams and whole answers, compared token by token with those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

# Closed-loop clients, and the pause between requests that arrive regardless of them, up to a bound.
CLIENTS = 4
ARRIVAL_S = 0.8
MOST_OPEN = 24
# After a broken connection, a client tries to reconnect for this long.
RECONNECT_S = 90.0
RECONNECT_PAUSE_S = 0.1
# A stream that is silent for longer counts as lost.
SILENCE_S = 180.0
# Log probabilities of a model differ in their last digits with the batch.
LOGPROB_TOLERANCE = 0.03
DONE = "[DONE]"
BATCH_POLL_S = 0.3
ENDED_BATCH = ("completed", "failed", "expired", "cancelled")
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Shape(Enum):
    """How a request is made: in OpenAI's or Anthropic's words, or as lines of a batch, which are its body's `lines`."""

    OPENAI = auto()
    MESSAGES = auto()
    BATCH = auto()


@dataclass(frozen=True, slots=True)
class Case:
    """A request that is always answered with the same tokens; `has_key`: it has an Idempotency-Key."""

    name: str
    path: str
    body: Mapping[str, Any]
    has_key: bool = False
    shape: Shape = Shape.OPENAI

    def body_of(self, user: str) -> dict[str, Any]:
        """Return the body with the name of its user."""
        named = {"metadata": {"user_id": user}} if self.shape is Shape.MESSAGES else {"user": user}
        return {**self.body, **named}

    def lines_of(self, user: str) -> bytes:
        """Return the file of a batch."""
        lines = (
            {"custom_id": str(number), "method": "POST", "url": self.path, "body": {**body, "user": user}}
            for number, body in enumerate(self.body["lines"])
        )
        return "\n".join(map(json.dumps, lines)).encode()


def cases(model: str, *, simulated: bool) -> list[Case]:
    """Return the requests of the load: greedy and seeded, chats and completions, with log probabilities."""
    tokens = 120 if simulated else 24
    common = {
        "model": model, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        "ignore_eos": True, "max_tokens": tokens,
    }  # fmt: skip
    chat, completions = "/v1/chat/completions", "/v1/completions"
    asked = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
    seeded = {"temperature": 0.8, "seed": 11}
    # The simulated engine makes tokens up from the seed, also of greedy requests.
    greedy = {"temperature": 0, "seed": 7}
    found = [
        Case("seeded chat", chat, {**common, **seeded, "messages": asked, "logprobs": True, "top_logprobs": 3}, True),
        Case("greedy chat", chat, {**common, **greedy, "messages": asked, "logprobs": True, "top_logprobs": 0}),
        Case("seeded text", completions, {**common, **seeded, "prompt": "The sea was", "logprobs": 2}),
        Case("greedy text", completions, {**common, **greedy, "prompt": "Paris is", "logprobs": 1}, True),
        Case("two choices", completions, {**common, **seeded, "prompt": "One day", "n": 2, "logprobs": 1}),
        Case("long prompt", completions, {**common, **greedy, "prompt": LONG, "max_tokens": tokens // 2}),
    ]
    if not simulated:
        grammar = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        body = {**common, **greedy, "messages": asked, "response_format": grammar, "max_tokens": 48}
        del body["ignore_eos"]
        found.append(Case("grammar", chat, body))
    return found


class StreamError(Exception):
    """An event of the stream is an error."""


@dataclass(slots=True)
class ChoiceOutput:
    """One choice as its client has it; of each token's log probability the values, the chosen token's first."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    finish: str | None = None

    def differs_from(self, other: ChoiceOutput) -> str | None:
        """Return the first difference in a few words."""
        if self.token_ids != other.token_ids:
            pairs = zip(self.token_ids, other.token_ids, strict=False)
            first = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
            lengths = f"{len(self.token_ids)} tokens instead of {len(other.token_ids)}"
            return lengths if first is None else f"another token {first}"
        if self.text != other.text:
            return "another text"
        if self.finish != other.finish:
            return f"finish {self.finish} instead of {other.finish}"
        if len(self.logprobs) != len(other.logprobs):
            return f"{len(self.logprobs)} log probabilities instead of {len(other.logprobs)}"
        for index, (one, two) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if len(one) != len(two) or not all(map(_close, one, two)):
                return f"another log probability of token {index}"
        return None


def _close(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)


@dataclass(slots=True)
class Exchange:
    """One request with all that its client saw, over all its connections."""

    case: Case
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    choices: dict[int, ChoiceOutput] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    event_ids: list[str] = field(default_factory=list)
    reconnects: int = 0
    # The longest time without an event, in seconds, reconnecting included; the first event counts from the request.
    pause_s: float = 0.0
    last_event_at: float = field(default_factory=time.monotonic)
    # Why it was lost.
    failure: str | None = None
    # Its connection broke, and its events had no ids with which it could be continued: it had no record.
    is_cut: bool = False
    # How often its connection broke before its first event, so that it was sent again.
    sent_again: int = 0

    @property
    def events(self) -> list[int]:
        """The numbers of the events that have an id."""
        return [int(each.rpartition("/")[2].partition(".")[0]) for each in self.event_ids]

    def note_event(self) -> None:
        """An event has arrived."""
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - self.last_event_at)
        self.last_event_at = now

    def start_again(self) -> None:
        """Forget what has been received."""
        self.choices.clear()
        self.event_ids.clear()

    def add(self, chunk: Mapping[str, Any]) -> bool:
        """Take in an event or a whole answer; return whether it is the last one.

        Raises:
            StreamError: it says that the request has failed.
        """
        kind = chunk.get("type")
        if chunk.get("error") or kind in ("error", "response.failed"):
            error = chunk.get("error") or chunk
            raise StreamError(f"error in the stream: {error.get('message') or json.dumps(chunk)[:300]}")
        if kind is not None:
            return self._add_typed(kind, chunk)
        self._add_choices(chunk)
        for each in chunk.get("data", ()):
            self._choice(each["index"]).logprobs = [tuple(each["embedding"])]
        if "meta_info" in chunk:
            meta = chunk["meta_info"]
            self._choice(0).text, self._choice(0).finish = chunk["text"], json.dumps(meta["finish_reason"])
            self.usage = meta["prompt_tokens"], meta["completion_tokens"]
        usage = chunk.get("usage")
        if usage:
            self.usage = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        return False

    def _choice(self, index: int) -> ChoiceOutput:
        return self.choices.setdefault(index, ChoiceOutput())

    def _add_choices(self, chunk: Mapping[str, Any]) -> None:
        """Take in a chunk of a chat or a completion, or a whole one."""
        for piece in chunk.get("choices", ()):
            output = self._choice(piece["index"])
            output.token_ids += piece.get("token_ids") or ()
            said = piece.get("delta") or piece.get("message") or {}
            output.text += piece.get("text") or said.get("content") or ""
            output.logprobs += _logprobs(piece.get("logprobs"))
            output.finish = piece.get("finish_reason") or output.finish

    def _add_typed(self, kind: str, chunk: Mapping[str, Any]) -> bool:
        """Take in an event of /v1/messages or /v1/responses, or a whole message.

        Messages do not count cached tokens as input.
        """
        output = self._choice(0)
        match kind:
            case "content_block_delta":
                output.text += chunk["delta"].get("text", "")
            case "response.output_text.delta":
                output.text += chunk["delta"]
            case "message":
                output.text = "".join(block.get("text", "") for block in chunk["content"])
                output.finish = chunk["stop_reason"]
                self.usage = 0, chunk["usage"]["output_tokens"]
            case "message_delta":
                output.finish = chunk["delta"]["stop_reason"]
                self.usage = 0, chunk["usage"]["output_tokens"]
            case "response.completed" | "response.incomplete":
                output.finish, usage = kind, chunk["response"]["usage"]
                self.usage = usage["input_tokens"], usage["output_tokens"]
                return True
        return kind == "message_stop"

    def difference(self, reference: Exchange) -> str | None:
        """Return how the answer differs from an undisturbed one, in a few words."""
        if self.events and self.events != list(range(self.events[0], self.events[0] + len(self.events))):
            return "an event is missing or came twice"
        if self.choices.keys() != reference.choices.keys():
            return f"choices {sorted(self.choices)} instead of {sorted(reference.choices)}"
        for index, choice in self.choices.items():
            if (difference := choice.differs_from(reference.choices[index])) is not None:
                return difference
        return None if self.usage == reference.usage else f"usage {self.usage} instead of {reference.usage}"


def _logprobs(reported: Mapping[str, Any] | None) -> list[tuple[float, ...]]:
    """Return the values of each token: of completions in lists by kind, of chats in one object per token."""
    if not reported:
        return []
    if "content" in reported:
        return [(token["logprob"], *(top["logprob"] for top in token["top_logprobs"])) for token in reported["content"]]
    tops: Sequence[Mapping[str, float] | None] = reported["top_logprobs"] or [None] * len(reported["token_logprobs"])
    return [
        (value, *sorted((top or {}).values(), reverse=True))
        for value, top in zip(reported["token_logprobs"], tops, strict=True)
    ]


class RefusedError(Exception):
    """The gateway answered with a status of failure; `passes`: a retry may help."""

    def __init__(self, status: int, text: str, *, passes: bool) -> None:
        super().__init__(f"status {status}: {text[:200]}")
        self.passes = passes
        self.is_forgotten = status == httpx.codes.NOT_FOUND


class Client:
    """Sends requests to a gateway, and continues streams whose connection broke.

    If the gateway itself is to be replaced (`expects_replacement`), refusals with a hint to retry are followed, as all
    SDKs do. If it records answers in its memory only (`forgets`), they begin again after its death.
    """

    def __init__(
        self,
        url: str,
        *,
        expects_replacement: bool = False,
        forgets: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send requests to `url`, all with `headers`."""
        self._expects_replacement = expects_replacement
        self._forgets = forgets
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(SILENCE_S, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def exchange(self, exchange: Exchange, user: str) -> None:
        """Send a request and receive its whole answer; failures are kept in `exchange`."""
        key = {"idempotency-key": secrets.token_hex(8)} if exchange.case.has_key else {}
        try:
            if exchange.case.shape is Shape.BATCH:
                return await self._run_batch(exchange, user)
            body = exchange.case.body_of(user)
            while not await self._receive(exchange, body, key):  # noqa: ASYNC110  (each turn is a connection)
                await asyncio.sleep(RECONNECT_PAUSE_S)
        except (RefusedError, StreamError, httpx.HTTPError, ValueError) as error:
            exchange.failure = str(error) or type(error).__name__
        finally:
            exchange.ended_at = time.monotonic()

    async def _receive(self, exchange: Exchange, body: Mapping[str, Any], key: Mapping[str, str]) -> bool:
        """Receive the stream, or the rest of it; return whether it is complete.

        Raises:
            RefusedError: the gateway refused it.
            StreamError: it failed.
            httpx.HTTPError: the gateway could not be reached again in time.
        """
        headers: Mapping[str, str] = {
            **key,
            **({"last-event-id": exchange.event_ids[-1]} if exchange.event_ids else {}),
        }
        give_up_at = time.monotonic() + RECONNECT_S
        while True:
            try:
                return await self._read(exchange, body, headers)
            except httpx.ReadTimeout:
                raise
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if time.monotonic() > give_up_at:
                    raise httpx.ConnectError("the gateway did not come back") from error
            except httpx.TransportError:
                if exchange.event_ids or not exchange.choices:
                    exchange.reconnects += 1
                    exchange.sent_again += not exchange.event_ids
                    return False
                exchange.is_cut = True
                raise
            except RefusedError as error:
                if error.is_forgotten and self._forgets:
                    exchange.start_again()
                    headers = key
                    continue
                # A gateway that is ending, or has just started, refuses; background responses need the shared state.
                may_pass = error.passes and (self._expects_replacement or bool(body.get("background")))
                if not may_pass or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _read(self, exchange: Exchange, body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        """Receive one connection's events; return whether the stream is complete.

        Raises:
            httpx.TransportError: the connection broke.
        """
        async with self._http.stream(**_request(exchange, body, headers)) as answer:
            await _check(answer)
            if answer.headers["content-type"].startswith("application/json"):
                exchange.add(json.loads(await answer.aread()))
                return True
            async for event_id, data in _events(answer):
                exchange.note_event()
                if event_id is not None:
                    exchange.event_ids.append(event_id)
                if data == DONE:
                    return True
                if exchange.add(json.loads(data)):
                    return True
        raise httpx.RemoteProtocolError("the stream ended early")

    async def _run_batch(self, exchange: Exchange, user: str) -> None:
        """Have a batch made and read its output.

        Raises:
            StreamError: a line has failed.
        """
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", exchange.case.lines_of(user))}}
        file_id = (await self._ask(exchange, "POST", "/v1/files", **form)).json()["id"]
        wanted = {"input_file_id": file_id, "endpoint": exchange.case.path, "completion_window": "24h"}
        batch = (await self._ask(exchange, "POST", "/v1/batches", json=wanted)).json()
        while batch["status"] not in ENDED_BATCH:
            await asyncio.sleep(BATCH_POLL_S)
            batch = (await self._ask(exchange, "GET", f"/v1/batches/{batch['id']}")).json()
        if batch["status"] != "completed" or batch["request_counts"]["failed"]:
            raise StreamError(f"the batch is {batch['status']}, {batch['request_counts']}")
        content = await self._ask(exchange, "GET", f"/v1/files/{batch['output_file_id']}/content")
        total = 0
        for line in map(json.loads, content.text.splitlines()):
            answer, [piece] = line["response"]["body"], line["response"]["body"]["choices"]
            output = exchange.choices.setdefault(int(line["custom_id"]), ChoiceOutput())
            # A line that came twice has another text.
            output.text, output.finish = output.text + piece["text"], piece["finish_reason"]
            total += answer["usage"]["completion_tokens"]
        exchange.usage = 0, total

    async def _ask(self, exchange: Exchange, method: str, path: str, **given: Any) -> httpx.Response:
        """Return the response to a request that may be repeated.

        Raises:
            RefusedError: it is refused.
            httpx.TransportError: the gateway does not come back.
        """
        give_up_at = time.monotonic() + RECONNECT_S
        while True:
            try:
                answer = await self._http.request(method, path, **given)
                await _check(answer)
            except httpx.TransportError:
                if time.monotonic() > give_up_at:
                    raise
                exchange.reconnects = 1
            except RefusedError as error:
                # Files and batches are in the shared state, which a busy machine may not answer in time.
                if not error.passes or time.monotonic() > give_up_at:
                    raise
            else:
                return answer
            await asyncio.sleep(RECONNECT_PAUSE_S)


def _request(exchange: Exchange, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the request that begins an answer, or continues it."""
    path = exchange.case.path
    if exchange.event_ids and body.get("background"):
        response_id = exchange.event_ids[-1].rpartition("/")[0]
        return {"method": "GET", "url": f"{path}/{response_id}?stream=true&starting_after={exchange.events[-1]}"}
    return {"method": "POST", "url": path, "json": dict(body), "headers": dict(headers)}


async def _check(answer: httpx.Response) -> None:
    if answer.status_code != httpx.codes.OK:
        text = (await answer.aread()).decode(errors="replace")
        raise RefusedError(answer.status_code, text, passes="retry-after" in answer.headers)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str | None, str]]:
    """Yield the id and the data of each event that has data."""
    event_id: str | None = None
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, value
            event_id = None


class Load:
    """A steady load within a block; `exchanges` has all requests that began in it."""

    def __init__(
        self,
        url: str,
        requests: Sequence[Case],
        *,
        has_new_users: bool = False,
        expects_replacement: bool = False,
        forgets: bool = False,
    ) -> None:
        """Send `requests` in turn, by few users or each by a new one, of whom nothing is cached.

        See `Client` for the rest.
        """
        self._users = secrets.token_hex(4) if has_new_users else None
        self.exchanges: list[Exchange] = []
        self._cases = requests
        self._client = Client(url, expects_replacement=expects_replacement, forgets=forgets)
        self._begins = True
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sources: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to send requests."""
        self._sources = [asyncio.create_task(self._repeat()) for _ in range(CLIENTS)]
        self._sources.append(asyncio.create_task(self._arrive()))

    async def until_flowing(self, timeout_s: float = 120.0) -> None:
        """Wait until answers have tokens.

        Raises:
            TimeoutError: they have none in time.
        """
        async with asyncio.timeout(timeout_s):
            while sum(bool(exchange.choices) for exchange in self.exchanges) < CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def hold(self) -> None:
        """Begin no more requests."""
        self._begins = False
        self._sources[-1].cancel()

    async def finish(self, timeout_s: float) -> None:
        """Begin no more requests, and wait until the open ones have ended; those that have not are lost."""
        self.hold()
        _, open_ones = await asyncio.wait([*self._sources, *self._tasks], timeout=timeout_s)
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        for exchange in self.exchanges:
            if not _is_complete(exchange) and exchange.failure is None:
                exchange.failure = f"no end within {timeout_s:g} s of the fault's end"
        await self._client.close()

    async def _repeat(self) -> None:
        while self._begins:
            await self._exchange()

    async def _arrive(self) -> None:
        while self._begins:
            await asyncio.sleep(ARRIVAL_S)
            if sum(exchange.ended_at is None for exchange in self.exchanges) < MOST_OPEN:
                task = asyncio.create_task(self._exchange())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _exchange(self) -> None:
        number = self._next
        self._next += 1
        exchange = Exchange(self._cases[number % len(self._cases)])
        self.exchanges.append(exchange)
        user = f"user-{number % 7}" if self._users is None else f"{self._users}-{number}"
        await self._client.exchange(exchange, user)
        if exchange.failure is not None:
            # A gateway that refuses everything is not to be flooded.
            await asyncio.sleep(0.5)


def _is_complete(exchange: Exchange) -> bool:
    return exchange.usage is not None


async def references(url: str, requests: Sequence[Case]) -> dict[str, Exchange]:
    """Return undisturbed answers to all cases, by the cases' names.

    Raises:
        RuntimeError: one fails.
    """
    client = Client(url)
    try:
        found = {}
        for case in requests:
            exchange = found[case.name] = Exchange(case)
            await client.exchange(exchange, "user-0")
            if exchange.failure is not None:
                raise RuntimeError(f"{case.name} fails without any fault: {exchange.failure}")
        return found
    finally:
        await client.close()
