"""Sends the requests of a workload to an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.openai_stream import AnswerReader, error_message
from deploy.evaluation.bench.records import RequestRecord
from deploy.evaluation.bench.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.evaluation.bench.clock import Clock
    from deploy.evaluation.bench.prompts import PromptMaker
    from deploy.evaluation.bench.records import BenchRequest
    from deploy.evaluation.bench.transport import BodySink, HttpClient, Response

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


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
