"""The HTTP response of a generation, and its delivery: as events, as one body, or as one body rendered piecewise.

The response submits the prompts, and aborts them if the client disconnects.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, Self

from starlette.responses import Response

from common.errors import RequestFailedError
from common.types import ErrorCode, RequestFailure
from gateway.delivery.collecting import PromptScores, WholeChoice, collect, count_logprobs
from gateway.server.middleware import add_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

    from common.errors import PandoError
    from common.requests import GenerateRequest
    from gateway.generation.generation import Generation, Usage
    from gateway.generation.generations import Generations
    from gateway.generation.journal import ChoiceUpdate
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
# The event loop gets control after rendering this much, which takes a few milliseconds.
PIECE_BYTES = 256 * 1024


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


class ClientWatch:
    """Cancels the block it surrounds when the client disconnects, and absorbs that cancellation at the block's end.

    The block's `finally` clauses run as in any cancellation; after the `async with`, `gone` is set if the client
    disconnected. The request's body must have been read before: the next message of `receive` is then the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.was_cut = False
        self._receive = receive
        self._served: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._served = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        """Stop watching; suppress only the cancellation that this object requested."""
        assert self._watcher is not None
        assert self._served is not None
        self._watcher.cancel()
        if not (self.gone or self.was_cut):
            return False
        if kind is None:
            # The block ended at the same moment; the cancellation has not been delivered yet.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                kind = asyncio.CancelledError
        # A cancellation that came from elsewhere propagates.
        return self._served.uncancel() == 0 and kind is asyncio.CancelledError

    def cut(self) -> None:
        """Cancel the block as if the client had disconnected."""
        if not (self.gone or self.was_cut):
            self.was_cut = True
            self._cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.was_cut:
            self.gone = True
            self._cancel()

    def _cancel(self) -> None:
        assert self._served is not None
        self._served.cancel()


async def end_at_once() -> None:
    """The default `before_end`: nothing to wait for."""


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


class PiecewiseDelivery:
    """Collects all updates, renders them piecewise so that other tasks can run in between, and sends one body."""

    def __init__(self, renderer: PiecewiseRenderer) -> None:
        self._renderer = renderer

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Wait for the end of all choices and send them; see `Delivery`."""
        choices = [WholeChoice() for entry in generation.entries for _ in entry.choices]
        while (updates := await generation.next_updates()) is None or updates:
            collect(updates or (), choices)
        pieces, written = [], 0
        for piece in self._renderer.pieces(choices, generation.usage):
            pieces.append(piece)
            written += len(piece)
            if written > PIECE_BYTES:
                written = 0
                await asyncio.sleep(0)
        body = b"".join(pieces)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class StreamRenderer(Protocol):
    """Renders the events of one stream."""

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the events for one update; empty if they would contain nothing new."""

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last update, including the end mark."""

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, including the end mark."""


class WholeRenderer(Protocol):
    """Renders a response as one body."""

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body."""


class PiecewiseRenderer(Protocol):
    """Renders a long response in pieces, each of which takes a short time."""

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the JSON body."""
