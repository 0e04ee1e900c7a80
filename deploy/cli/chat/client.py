"""Client of an OpenAI-compatible server that streams answers and measures their speed, and the messages it sends."""

from __future__ import annotations

import base64
import json
import mimetypes
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONNECT_TIMEOUT_S = 5.0
# A long prompt on a slow machine takes long before the first token; Ctrl-C ends the wait.
READ_TIMEOUT_S = 600.0
# More than any server takes, and less than would fill the memory.
MAX_IMAGE_BYTES = 256 * 1024 * 1024
HistoryMessage = dict[str, Any]  # Any: free JSON


class ChatError(Exception):
    """There is no answer or no complete one; the message is for the user at the terminal."""


class UnreachableError(ChatError):
    """No server listens at the URL."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Parameters of every request."""

    model: str
    user: str
    temperature: float = 1.0
    max_tokens: int | None = None


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer; complete once `finish_reason` is set. Times are in seconds of the client's clock."""

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
        """The text received so far."""
        return "".join(self.pieces)

    @property
    def time_to_first_s(self) -> float | None:
        """Seconds from the request to the first text; None before it."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None if the server reports no token counts or there are too few tokens."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return (self.completion_tokens - 1) / (self.last_s - self.first_s) if self.completion_tokens else None


def tls_context(authority: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for HTTPS with the given PEM files; None for the default one.

    Raises:
        ChatError: a file cannot be read or is invalid.
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
    """An HTTP client for one server."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare for the server at `url`, with or without /v1 at the end.

        Raises:
            ChatError: the URL is invalid.
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
        """Return the first model in the server's list that can chat.

        Raises:
            UnreachableError: no server listens at the URL.
            ChatError: the server lists no model, or refuses the request.
        """
        with self._explained():
            response = self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            if response.status_code != httpx.codes.OK:
                raise ChatError(_refusal(response))
            try:
                listed = response.json()["data"]
                # Other servers do not report the kind of a model.
                return str(
                    next((model for model in listed if model.get("kind") in (None, "generate")), listed[0])["id"]
                )
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ChatError(f"{self.url} lists no model; is it an OpenAI-compatible server?") from None

    def ask(
        self, messages: list[HistoryMessage], options: ChatOptions, on_text: Callable[[str], None]
    ) -> StreamedAnswer:
        """Send the conversation and return the answer; `on_text` is called with its pieces as they arrive.

        An exception in `on_text`, or KeyboardInterrupt, closes the connection, which aborts the answer.

        Raises:
            ChatError: there was no answer, or it was incomplete; `on_text` has received the pieces until then.
        """
        body = _body(messages, options)
        answer = StreamedAnswer(self._now())
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
            raise ChatError("the answer is incomplete: the stream ended early")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _explained(self) -> _Explained:
        return _Explained(self.url)


class _Explained:
    """Converts httpx's exceptions into `ChatError`s with messages for users."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                raise UnreachableError(
                    f"no server answers at {self._url}; start one with `pando up` or make serve, or set --url"
                ) from error
            case httpx.UnsupportedProtocol() | httpx.InvalidURL():
                raise ChatError(f"not a URL: {self._url}") from error
            case httpx.TimeoutException():
                raise ChatError(f"{self._url} does not answer in time") from error
            case httpx.HTTPError():
                raise ChatError(f"the connection to {self._url} failed: {error}") from error
            case _:
                pass


def _body(messages: list[HistoryMessage], options: ChatOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        # The same user on every turn, so that the server can reuse the KV of earlier turns.
        "user": options.user,
    }
    return body if options.max_tokens is None else {**body, "max_tokens": options.max_tokens}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of the stream's `data:` lines.

    Raises:
        ChatError: an event is not valid JSON, or reports an error.
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


def _read_chunk(answer: StreamedAnswer, chunk: dict[str, Any]) -> list[str]:
    """Store the chunk's finish reason and usage in `answer`; return its text."""
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
    return f"the server answered {response.status_code}: {text}"


def _message(body: object) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image that goes to the model; the server judges its format by the bytes."""

    name: str
    content: bytes

    @classmethod
    def read(cls, path: Path) -> ChatImage:
        """Read a file.

        Raises:
            ChatError: it cannot be read, or its name is that of no image.
        """
        media_type = mimetypes.guess_type(path.name)[0] or ""
        if not media_type.startswith("image/"):
            raise ChatError(f"{path} has not the name of an image (.jpg, .png, .webp, .gif)")
        try:
            if path.stat().st_size > MAX_IMAGE_BYTES:
                raise ChatError(f"{path} has more than {MAX_IMAGE_BYTES} bytes")
            return cls(path.name, path.read_bytes())
        except OSError as error:
            raise ChatError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def part(self) -> HistoryMessage:
        """The part of a message that has the image."""
        media_type = mimetypes.guess_type(self.name)[0]
        data = base64.b64encode(self.content).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


@dataclass(slots=True)
class ChatHistory:
    """The messages of one chat, in the API's format."""

    system: str | None = None
    turns: list[HistoryMessage] = field(default_factory=list)
    # Of the next message of the user.
    images: list[ChatImage] = field(default_factory=list)

    def ask(self, text: str) -> list[HistoryMessage]:
        """Add a message of the user, with the waiting images before its text; return all messages to send."""
        content: object = text
        if self.images:
            content = [*(image.part for image in self.images), {"type": "text", "text": text}]
            self.images.clear()
        self.turns.append({"role": "user", "content": content})
        return self.messages

    def answer(self, text: str) -> None:
        """Add the model's answer. If it is empty, the user's message is removed, so that it can be sent again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def reset(self) -> None:
        """Remove all messages except the system prompt."""
        self.turns.clear()
        self.images.clear()

    @property
    def messages(self) -> list[HistoryMessage]:
        """All messages, the system prompt first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns
