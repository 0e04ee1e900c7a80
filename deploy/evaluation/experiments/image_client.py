"""The client of the experiment with images: conversations, their answers, and requests that another process sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple, Unpack

import orjson

from deploy.evaluation.bench.client import AnswerReader, error_message
from deploy.evaluation.bench.transport import HttpClient, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from deploy.evaluation.bench.partial_results import Deadline

# Any: JSON of requests.
Message = dict[str, Any]
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class RequestError(Exception):
    """A request was refused, or has no complete answer."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A complete answer, and what the server says of its prompt."""

    text: str
    first_token_ms: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be sent: encoding a picture's takes time that streams would wait."""

    path: str
    body: bytes


class ImageClient:
    """Sends conversations and prompts, and reads the streams."""

    def __init__(self, http: HttpClient, model: str, deadline: Deadline) -> None:
        self._http = http
        self._model = model
        self._deadline = deadline

    def chat(self, user: str, messages: Sequence[Message], tokens: int) -> PreparedRequest:
        """Return the request for an answer of so many tokens to a user's conversation."""
        return self._prepared("/v1/chat/completions", user, tokens, {"messages": messages})

    def completion(self, user: str, ids: Sequence[int], tokens: int) -> PreparedRequest:
        """Return the request for so many tokens after a user's prompt, given by its token ids."""
        return self._prepared("/v1/completions", user, tokens, {"prompt": ids})

    async def ask(
        self, user: str, messages: Sequence[Message], tokens: int, reader: AnswerReader | None = None
    ) -> TimedAnswer:
        """Send a `chat`; see `send`."""
        return await self.send(self.chat(user, messages, tokens), reader)

    async def send(self, request: PreparedRequest, reader: AnswerReader | None = None) -> TimedAnswer:
        """Send a request and return its answer; `reader` can be watched meanwhile.

        Raises:
            RequestError: it is refused, fails, or does not end before the deadline.
        """
        reader = reader or AnswerReader(time.monotonic)
        began_at = time.monotonic()
        try:
            response = await self._http.request(
                "POST", request.path, request.body, sink=reader.feed, timeout_s=self._deadline.left_s
            )
        except TransportError as error:
            raise RequestError(f"{error.kind}: {error}") from error
        if response.status != 200:
            raise RequestError(f"HTTP {response.status}: {error_message(orjson.loads(response.body))}")
        times = reader.output_times()
        if reader.error is not None or not times:
            raise RequestError(reader.error or "an answer without a token")
        first_ms = (times[0] - began_at) * 1e3
        return TimedAnswer("".join(reader.text), first_ms, reader.input_tokens or 0, reader.cached_tokens or 0)

    def _prepared(self, path: str, user: str, tokens: int, content: dict[str, Any]) -> PreparedRequest:
        common = {
            "model": self._model, "max_tokens": tokens, "temperature": 1.0, "user": user, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return PreparedRequest(path, orjson.dumps(common | content))


class OtherProcess:
    """Sends requests from a process of its own: large bodies would delay the reading of streams that are watched."""

    def __init__(self, url: str, model: str, deadline: Deadline) -> None:
        """Prepare for a server; entering starts the process."""
        self._server = url, model, deadline
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._process: int | None = None

    async def __aenter__(self) -> Self:
        """Start the process, which takes a second."""
        self._process = await self._run(os.getpid)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # This process waits for that one at its end, which may wait for answers.
        if error is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def hold(self, requests: Sequence[PreparedRequest]) -> None:
        """Hand over the requests that `send` sends.

        Raises:
            RequestError: the process has died.
        """
        await self._run(_hold, tuple(requests))

    async def send(self, rate: float, began_at: float) -> list[TimedAnswer]:
        """Send the requests, so many a second from `began_at` of the monotonic clock on; return their answers.

        Raises:
            RequestError: one is refused, fails, or does not end before the deadline, or the process has died.
        """
        return await self._run(_send_held, *self._server, rate, began_at)

    async def _run(self, call: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
        except BrokenProcessPool as error:
            raise RequestError("the process that sends requests beside streams has died") from error


# Of the process that sends them.
_held: list[PreparedRequest] = []


def _hold(requests: Sequence[PreparedRequest]) -> None:
    _held[:] = requests


def _send_held(url: str, model: str, deadline: Deadline, rate: float, began_at: float) -> list[TimedAnswer]:
    return asyncio.run(send_at_rate(ImageClient(HttpClient(url), model, deadline), _held, rate, began_at))


async def send_at_rate(
    client: ImageClient, requests: Sequence[PreparedRequest], rate: float, began_at: float
) -> list[TimedAnswer]:
    """Send so many requests a second from `began_at` of the monotonic clock on; return their answers.

    Raises:
        RequestError: one is refused, fails, or does not end before the deadline.
    """

    async def send(number: int, request: PreparedRequest) -> TimedAnswer:
        await asyncio.sleep(began_at + number / rate - time.monotonic())
        return await client.send(request)

    return await asyncio.gather(*(send(number, request) for number, request in enumerate(requests)))
