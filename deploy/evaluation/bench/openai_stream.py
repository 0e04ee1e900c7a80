"""Reader of an OpenAI-compatible server's streamed answers: times from chunks, token counts from usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable
DONE = b"[DONE]"


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
