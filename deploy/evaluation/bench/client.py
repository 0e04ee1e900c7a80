"""Sends the requests of a workload to an OpenAI-compatible server, and reads its streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.records import RequestRecord
from deploy.evaluation.bench.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deploy.evaluation.bench.clock import Clock
    from deploy.evaluation.bench.prompts import PromptMaker
    from deploy.evaluation.bench.records import BenchRequest
    from deploy.evaluation.bench.transport import BodySink, HttpClient, Response

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Parameters that all requests of a load have in common."""

    model: str
    endpoint: str = "completions"
    """completions or chat."""
    temperature: float = 0.0
    ignore_eos: bool = True
    user_field: str | None = "user"
    """Body field for the user: user, user_id, safety_identifier, or cache_salt for vLLM."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0


class OpenAIClient:
    """Sends requests and records the responses; a failure is a record, too, never an exception."""

    def __init__(self, http: HttpClient, prompts: PromptMaker, options: RequestTemplate, clock: Clock) -> None:
        self._http = http
        self._prompts = prompts
        self._options = options
        self._clock = clock

    async def send(self, request: BenchRequest, late_s: float = 0.0) -> RequestRecord:
        """Send one streaming request and wait for its end; `late_s` is how late it is sent, in seconds."""
        reader = AnswerReader(self._clock.now)
        started = self._clock.now()
        error: tuple[str, str] | None
        try:
            error = _failure(await self.exchange(request, reader.feed), reader)
        except TransportError as failure:
            error = (failure.kind, str(failure))
        times = reader.output_times()
        counted = reader.output_tokens is None
        return RequestRecord(
            started_s=started,
            ended_s=self._clock.now(),
            chunks_s=times,
            input_tokens=request.input_tokens if reader.input_tokens is None else reader.input_tokens,
            output_tokens=len(times) if reader.output_tokens is None else reader.output_tokens,
            counted_by_chunks=counted and error is None,
            cached_tokens=reader.cached_tokens,
            error=error[0] if error else None,
            message=error[1] if error else "",
            late_s=late_s,
        )

    async def exchange(self, request: BenchRequest, sink: BodySink) -> Response:
        """Send one request and feed the response's bytes to `sink`; cancellation closes the connection.

        Raises:
            TransportError: the response is incomplete.
        """
        body = orjson.dumps(self.body(request), option=orjson.OPT_SERIALIZE_NUMPY)
        path, timeout_s = PATHS[self._options.endpoint], self._options.timeout_s
        return await self._http.request("POST", path, body, sink=sink, timeout_s=timeout_s)

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the JSON body of `request`."""
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": request.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.endpoint == "chat":
            body["messages"] = self._prompts.messages(request.segments)
        else:
            body["prompt"] = self._prompts.prompt(request.segments)
        if options.ignore_eos:
            body["ignore_eos"] = True
        if request.user is not None and options.user_field:
            body[options.user_field] = request.user
        return {**body, **options.extra_body}


def _failure(response: Response, reader: AnswerReader) -> tuple[str, str] | None:
    """Return the kind and message of the error in a complete response; None if there is none."""
    if response.status != 200:
        try:
            message = error_message(orjson.loads(response.body))
        except orjson.JSONDecodeError:
            message = response.body[:200].decode(errors="replace")
        return f"http_{response.status}", message
    if reader.error is not None:
        return "stream_error", reader.error
    if not reader.finished:
        return "truncated", "the stream ended without a finish reason or [DONE]"
    return None


class AnswerReader:
    """The sink of one response, whose attributes hold its contents afterwards; `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.chunks_s: list[float] = []
        self.text: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self.finished = False
        self._now = now
        self._splitter = EventSplitter()
        self._first_choice_s: float | None = None

    def feed(self, piece: bytes) -> None:
        """Process the next bytes of the body."""
        now = self._now()
        for payload in self._splitter.feed(piece):
            if payload == DONE:
                self.finished = True
            else:
                self._read(now, payload)

    def output_times(self) -> tuple[float, ...]:
        """Return the arrival times of output.

        Tokens without text (incomplete characters, special tokens) arrive as chunks with empty text. They only count if
        there was no other output, because some servers begin a stream with an empty chunk.
        """
        if not self.chunks_s and self._first_choice_s is not None and self.output_tokens:
            return (self._first_choice_s,)
        return tuple(self.chunks_s)

    def _read(self, now: float, payload: bytes) -> None:
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = f"an event is not JSON: {payload[:200]!r}"
            return
        if not isinstance(chunk, dict):
            self.error = f"an event is not an object: {payload[:200]!r}"
            return
        if chunk.get("error"):
            self.error = error_message(chunk)
        for choice in chunk.get("choices") or ():
            self._read_choice(now, choice)
        if isinstance(usage := chunk.get("usage"), dict):
            self._read_usage(usage)
        if isinstance(timings := chunk.get("timings"), dict):
            self._read_timings(timings)

    def _read_choice(self, now: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice
        text = delta.get("content") or delta.get("text") or delta.get("reasoning_content") or delta.get("reasoning")
        if text or delta.get("tool_calls"):
            self.chunks_s.append(now)
            self.text.append(text or "")
        elif self._first_choice_s is None:
            self._first_choice_s = now
        if choice.get("finish_reason"):
            self.finished = True

    def _read_usage(self, usage: dict[str, Any]) -> None:
        self.input_tokens = usage.get("prompt_tokens", self.input_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.cached_tokens = self.cached_tokens if cached is None else cached

    def _read_timings(self, timings: dict[str, Any]) -> None:
        """Read counts that are missing in usage from llama-server's own field."""
        cached, computed = timings.get("cache_n"), timings.get("prompt_n")
        if self.cached_tokens is None:
            self.cached_tokens = cached
        if self.input_tokens is None and computed is not None:
            self.input_tokens = computed + (cached or 0)
        if self.output_tokens is None:
            self.output_tokens = timings.get("predicted_n")


def error_message(body: Any) -> str:
    """Return the message of a server's error body; most servers use `error.message`."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


class EventSplitter:
    """Splits a body that arrives in arbitrary pieces into the payloads of its `data:` lines.

    Other fields and comments are skipped. llama-server may report failures on an `error:` line; its payload is returned
    like data, because it is also a JSON object with the key `error`.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [payload for line in lines if (payload := _payload(line))]


def _payload(line: bytes) -> bytes:
    field, _, value = line.partition(b":")
    return value.strip() if field in (b"data", b"error") else b""
