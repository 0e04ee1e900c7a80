"""Responses of generations: server-sent events, or one body."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from common.errors import RequestFailedError
from common.types import ErrorCode, RequestFailure
from gateway.delivery.watch import ClientWatch
from gateway.endpoints.prompt_logprobs import PromptScores
from gateway.endpoints.shapes import WholeChoice, collect, count_logprobs
from gateway.server.middleware import add_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from common.requests import GenerateRequest
    from gateway.endpoints.shapes import StreamRenderer, WholeRenderer
    from gateway.generation.generation import Generation
    from gateway.generation.generations import Generations
    from gateway.quotas.quotas import Lease

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disables response buffering in nginx and compatible proxies.
    (b"x-accel-buffering", b"no"),
]
# Log probabilities of generated tokens that are kept until a response is complete: some 200 MB.
MAX_WHOLE_VALUES = 1_048_576
TOO_MANY_VALUES = RequestFailure(
    ErrorCode.INVALID_REQUEST,
    f"The answer has more than {MAX_WHOLE_VALUES} log probabilities: stream it, or ask for fewer of them.",
    param="logprobs",
)
# A comment in the event stream format, which clients ignore.
KEEP_ALIVE = b": keep-alive\n\n"


async def end_at_once() -> None:
    """The default `before_end`: nothing to wait for."""


class Delivery(Protocol):
    """Sends a generation's output to its client."""

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Send the whole response.

        Raises:
            RequestFailedError: the request failed before anything was sent.
        """


class GenerationResponse(Response):
    """Submits the prompts, delivers the result, and aborts all of them when the client disconnects."""

    def __init__(
        self,
        generations: Generations,
        requests: Sequence[GenerateRequest],
        delivery: Delivery,
        take: Callable[[], Awaitable[Lease]],
        buffer_bytes: int | None = None,
    ) -> None:
        """Prepare to submit `requests`; `take` charges them to the quotas first.

        At most about `buffer_bytes` of their text wait for a slow client.
        """
        super().__init__()
        self._take = take
        self._generations = generations
        self._requests = requests
        self._delivery = delivery
        self._buffer_bytes = buffer_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the client.

        Raises:
            PandoError: the requests were refused, or failed before anything was sent.
        """
        lease = await self._take()
        add_headers(scope, lease.headers())
        used_tokens = 0
        try:
            generation = self._generations.open(self._requests, buffer_bytes=self._buffer_bytes)
            try:
                await self._serve(generation, receive, send)
            finally:
                used_tokens = generation.usage.prompt_tokens + generation.usage.completion_tokens
        finally:
            lease.settle(used_tokens)

    async def _serve(self, generation: Generation, receive: Receive, send: Send) -> None:
        watch = ClientWatch(receive)
        generation.on_overflow = watch.cut
        cause = None
        try:
            async with watch:
                await self._delivery.deliver(generation, send)
        except asyncio.CancelledError:
            cause = "shutdown"
            raise
        finally:
            self._generations.close(generation, "disconnect" if watch.gone else cause)


class StreamDelivery:
    """Sends updates as they come; the status line waits for the first, so that an early failure has its own status."""

    def __init__(
        self,
        renderer: StreamRenderer,
        keep_alive_s: float,
        before_end: Callable[[], Awaitable[None]] = end_at_once,
    ) -> None:
        """Write events with `renderer`, and a comment after every `keep_alive_s` without events.

        `before_end` is awaited between rendering the last event and sending it.
        """
        self._renderer = renderer
        self._before_end = before_end
        self._keep_alive_s = keep_alive_s
        self._sent_at = float("-inf")
        self._ticking: asyncio.TimerHandle | None = None

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Send the events, then the end mark; a failure after the start is sent as an event before the end mark.

        The status line and comments are also sent while the client waits long for the first update.
        """
        ticking = asyncio.get_running_loop().call_later(self._keep_alive_s, self._tick, generation)
        try:
            await self._deliver(generation, send)
        finally:
            (self._ticking or ticking).cancel()

    async def _deliver(self, generation: Generation, send: Send) -> None:
        updates = await generation.next_updates()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        try:
            while updates is None or updates:
                events = KEEP_ALIVE if updates is None else b"".join(map(self._renderer.events, updates))
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._sent_at = asyncio.get_running_loop().time()
                updates = await generation.next_updates()
            ending = self._renderer.ending(generation.usage)
        except RequestFailedError as error:
            ending = self._renderer.failure(error)
        await self._before_end()
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    def _tick(self, generation: Generation) -> None:
        """Nudge a reader that has waited for `keep_alive_s`. One timer per stream is cheaper than one per token."""
        loop = asyncio.get_running_loop()
        left = self._sent_at + self._keep_alive_s - loop.time()
        if left <= 0:
            generation.nudge()
        self._ticking = loop.call_later(left if left > 0 else self._keep_alive_s, self._tick, generation)


class WholeDelivery:
    """Collects all updates and sends one body."""

    def __init__(self, renderer: WholeRenderer, before_end: Callable[[], Awaitable[None]] = end_at_once) -> None:
        """Write the body with `renderer`; `before_end` is awaited between rendering and sending it."""
        self._renderer = renderer
        self._before_end = before_end

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Wait for the end of all choices and send them.

        Raises:
            RequestFailedError: the request failed, or has more than MAX_WHOLE_VALUES log probabilities.
        """
        prompts = [PromptScores() for _ in generation.entries]
        pairs = zip(generation.entries, prompts, strict=True)
        choices = [WholeChoice(prompt=prompt) for entry, prompt in pairs for _ in entry.choices]
        values = 0
        while (updates := await generation.next_updates()) is None or updates:
            collect(updates or (), choices)
            values += count_logprobs(updates or ())
            if values > MAX_WHOLE_VALUES:
                raise RequestFailedError(TOO_MANY_VALUES)
        body = self._renderer.body(choices, generation.usage)
        await self._before_end()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
