"""Streams answers from an OpenAI-compatible server and notes how fast they came."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deploy.chat.conversation import Message

CONNECT_TIMEOUT_S = 5.0
# A long prompt on a slow machine is silent for long; Ctrl-C ends the wait.
READ_TIMEOUT_S = 600.0


class ChatError(Exception):
    """No answer, or not all of it; the message is for the person at the terminal."""


class UnreachableError(ChatError):
    """Nothing listens there."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What goes with every question."""

    model: str
    user: str
    temperature: float = 1.0
    max_tokens: int | None = None


@dataclass(slots=True)
class Answer:
    """One answer as it comes in; complete once `finish_reason` is set."""

    asked_s: float
    pieces: list[str] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self.pieces)

    @property
    def time_to_first_s(self) -> float | None:
        """From asking to the first text."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None if the server counts no tokens or there are too few."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return (self.completion_tokens - 1) / (self.last_s - self.first_s) if self.completion_tokens else None


def tls_context(authority: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return how to talk HTTPS, None for what everybody does.

    Raises:
        ChatError: a file cannot be read, or is none of the kind.
    """
    if authority is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ChatError(f"certificates: {error}") from error
    return context


class ChatClient:
    """Talks to one server."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare for the server at `url`, with or without its /v1.

        Raises:
            ChatError: it is no URL.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._now = now
        with self._explained():
            self._http = httpx.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                transport=transport,
                verify=tls or True,
            )

    def find_model(self) -> str:
        """Return the first model the server lists that can chat.

        Raises:
            UnreachableError: nothing listens there.
            ChatError: it lists none, or refuses.
        """
        with self._explained():
            response = self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            if response.status_code != httpx.codes.OK:
                raise ChatError(_refusal(response))
            try:
                listed = response.json()["data"]
                # Other servers do not say what kind of model one is.
                return str(next((model for model in listed if model.get("kind") != "embed"), listed[0])["id"])
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ChatError(f"{self.url} lists no model; is it an OpenAI-compatible server?") from None

    def ask(self, messages: list[Message], options: ChatOptions, on_text: Callable[[str], None]) -> Answer:
        """Send the conversation and return the answer; `on_text` gets its pieces as they come.

        An exception out of `on_text`, or KeyboardInterrupt, closes the connection, and so aborts the answer.

        Raises:
            ChatError: no answer, or it broke off; the pieces so far have been handed to `on_text`.
        """
        body = _body(messages, options)
        answer = Answer(self._now())
        with self._explained(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ChatError(_refusal(response))
            for chunk in _events(response):
                for piece in _read_chunk(answer, chunk):
                    answer.last_s = self._now()
                    answer.first_s = answer.first_s or answer.last_s
                    answer.pieces.append(piece)
                    on_text(piece)
        if answer.finish_reason is None:
            raise ChatError("the answer broke off")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _explained(self) -> _Explained:
        return _Explained(self.url)


class _Explained:
    """Turns what httpx raises into what a person can use."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                raise UnreachableError(
                    f"no server answers at {self._url}; start one with `pando up` or make serve, or name one with --url"
                ) from error
            case httpx.UnsupportedProtocol() | httpx.InvalidURL():
                raise ChatError(f"not a URL: {self._url}") from error
            case httpx.TimeoutException():
                raise ChatError(f"{self._url} does not answer in time") from error
            case httpx.HTTPError():
                raise ChatError(f"the connection to {self._url} broke: {error}") from error
            case _:
                pass


def _body(messages: list[Message], options: ChatOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        # The same user on every turn, so that the server may reuse what it has computed for the turns before.
        "user": options.user,
    }
    return body if options.max_tokens is None else {**body, "max_tokens": options.max_tokens}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of the stream's `data:` lines.

    Raises:
        ChatError: an event that is none, or that reports an error.
    """
    for line in response.iter_lines():
        name, _, value = line.partition(":")
        value = value.strip()
        if name not in ("data", "error") or not value or value == "[DONE]":
            continue
        try:
            chunk = json.loads(value)
        except ValueError:
            raise ChatError(f"unreadable event: {value[:200]}") from None
        if not isinstance(chunk, dict) or chunk.get("error") or name == "error":
            raise ChatError(f"the server ended the answer: {_message(chunk)}")
        yield chunk


def _read_chunk(answer: Answer, chunk: dict[str, Any]) -> list[str]:
    """Take finish and usage into `answer`; return the chunk's text."""
    pieces: list[str] = []
    for choice in chunk.get("choices") or ():
        pieces += [text] if (text := (choice.get("delta") or {}).get("content")) else []
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if isinstance(usage := chunk.get("usage"), dict):
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.completion_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return pieces


def _refusal(response: httpx.Response) -> str:
    try:
        text = _message(response.json())
    except ValueError:
        text = response.text[:200] or response.reason_phrase
    return f"the server answers {response.status_code}: {text}"


def _message(body: object) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
