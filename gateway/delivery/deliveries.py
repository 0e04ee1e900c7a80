"""The HTTP response of a generation, and its delivery: as events, as one body, or as one body rendered piecewise.

The response begins the answer, and closes it if the client disconnects, which aborts its requests.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from starlette.responses import Response

from common.errors import InvalidRequestError, PandoError, RequestFailedError
from common.types import ErrorCode, RequestFailure
from gateway.delivery.collecting import PromptScores, WholeChoice, collect, count_logprobs
from gateway.server.middleware import add_headers, pass_pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import TracebackType

    from starlette.types import Message, Receive, Scope, Send

    from gateway.delivery.answers import Answer
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disables response buffering in nginx and compatible proxies.
    (b"x-accel-buffering", b"no"),
]
STREAM_START: Message = {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS}
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
    """Sends an answer to its client."""

    async def deliver(self, answer: Answer, send: Send) -> None:
        """Send the whole response.

        Raises:
            PandoError: the answer failed before anything was sent.
        """


class AnswerResponse(Response):
    """Begins an answer, delivers it, and closes it at its end or when the client disconnects."""

    def __init__(self, answer: Answer, delivery: Delivery) -> None:
        super().__init__()
        self._answer = answer
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the client.

        Raises:
            PandoError: the requests were refused, or failed before anything was sent.
        """
        watch, cause = ClientWatch(receive), None
        try:
            add_headers(scope, await self._answer.begin(watch.cut))
            async with watch:
                await self._delivery.deliver(self._answer, pass_pieces(scope, send))
        except asyncio.CancelledError:
            cause = "shutdown"
            raise
        finally:
            self._answer.close("disconnect" if watch.gone else cause)


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
        # Its error refers to this object: in a cycle, the connection's state would wait for the garbage collector.
        self._watcher = None
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
        numbers: EventNumbers | None = None,
    ) -> None:
        """Write events with `renderer`, and a comment after every `keep_alive_s` without events.

        `before_end` is awaited between rendering the last event and sending it. `numbers` adds ids to the events.
        """
        self._renderer = renderer
        self._numbers = numbers
        self._before_end = before_end
        self._keep_alive_s = keep_alive_s
        self._sent_at = float("-inf")
        self._ticking: asyncio.TimerHandle | None = None

    async def deliver(self, answer: Answer, send: Send) -> None:
        """Send the events, then the end mark; a failure after the start is sent as an event before the end mark.

        The status line and comments are also sent while the client waits long for the first update.
        """
        ticking = asyncio.get_running_loop().call_later(self._keep_alive_s, self._tick, answer)
        try:
            await self._deliver(answer, send)
        finally:
            (self._ticking or ticking).cancel()

    async def _deliver(self, answer: Answer, send: Send) -> None:
        has_begun = False
        try:
            while (updates := await answer.next_updates()) is None or updates:
                events = self._render(answer, updates)
                if not has_begun:
                    if not self._is_status_known(answer, updates):
                        continue
                    await send(STREAM_START)
                    has_begun = True
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._sent_at = asyncio.get_running_loop().time()
            ending = self._renderer.ending(answer.usage)
        except UnknownEventError:
            raise
        except PandoError as error:
            # A failure that is recorded is a part of the stream, wherever the client continues.
            if not has_begun and not answer.is_complete:
                raise
            ending = self._renderer.failure(error)
        await answer.conclude(self._before_end)
        # A failure that is not recorded has no id: a client that continues has not received the event of this id.
        if self._numbers is not None and answer.is_complete:
            ending = self._numbers.number(ending)
        if not has_begun:
            await self._begin(answer, send)
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _begin(self, answer: Answer, send: Send) -> None:
        """Begin a stream of an ending alone, as `_is_status_known` has seen no updates."""
        if self._numbers is not None:
            self._numbers.check(answer)
        await send(STREAM_START)

    def _is_status_known(self, answer: Answer, updates: Sequence[ChoiceUpdate] | None) -> bool:
        """Whether the stream can begin; not before the events that the client has received are known.

        Raises:
            UnknownEventError: see `EventNumbers.check`.
        """
        if self._numbers is None:
            return True
        if updates is None:
            return self._numbers.has_caught_up
        self._numbers.check(answer)
        return True

    def _render(self, answer: Answer, updates: Sequence[ChoiceUpdate] | None) -> bytes:
        if updates is None:
            # An id stays in force in clients, some of which take every blank line after it for the end of an event.
            return KEEP_ALIVE if self._numbers is None else KEEP_ALIVE[:-1]
        if self._numbers is None:
            return b"".join(map(self._renderer.events, updates))
        if not answer.keeps_numbers:
            self._numbers.stop()
        return b"".join([self._numbers.number(self._renderer.events(update), update) for update in updates])

    def _tick(self, answer: Answer) -> None:
        """Nudge a reader that has waited for `keep_alive_s`. One timer per stream is cheaper than one per token."""
        loop = asyncio.get_running_loop()
        left = self._sent_at + self._keep_alive_s - loop.time()
        if left <= 0:
            answer.nudge()
        self._ticking = loop.call_later(left if left > 0 else self._keep_alive_s, self._tick, answer)


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """The last event that a client has received, by its id."""

    number: int
    # None: the client names the number alone.
    check: int | None = None


NO_EVENT = ReceivedEvent(-1)


class UnknownEventError(InvalidRequestError):
    """The answer has no such event, so that the events after it cannot be found."""


class EventNumbers:
    """Gives the events of a stream consecutive ids, and leaves out those that the client has received.

    An id is `<answer>/<number>.<check>`. The check is a CRC-32 of all updates up to the event's: a gateway that is cut
    off from the record sends events that another gateway, which takes the record over, may generate in other portions,
    and so under other numbers.
    """

    def __init__(self, answer_id: str, seed: int | None, received: ReceivedEvent = NO_EVENT) -> None:
        """`received` is the last event that the client has received; the first has number 0.

        `seed`, the answer's own, begins the check, which then says less about the text to others who see an id.
        """
        self._prefix = b"id: %s/" % answer_id.encode()
        self._check = zlib.crc32(str(seed).encode())
        self._received = received
        self._next = 0
        self._has_stopped = False
        # The client has received another event than the one with its number.
        self._differs = False

    @property
    def has_caught_up(self) -> bool:
        """Whether the events that the client has received are among those so far."""
        return self._next > self._received.number

    def stop(self) -> None:
        """Give no more ids: with them, a client would continue elsewhere in the answer than it has come."""
        self._has_stopped = True

    def number(self, events: bytes, update: ChoiceUpdate | None = None) -> bytes:
        """Return those of an update's `events` that the client has not received, each with its id; None: the ending."""
        if update is not None:
            position = f"{update.index} {len(update.token_ids)} {update.text}"
            self._check = zlib.crc32(position.encode(), self._check)
        # JSON has no line breaks, so that a blank line always ends an event.
        if self._has_stopped and self.has_caught_up:
            # An empty id takes the last one back, of which clients would make use.
            return b"id\n" + events if events else events
        if events.find(b"\n\n") == len(events) - 2 and self.has_caught_up:
            # The usual case, of one new event, without cutting it out.
            self._next += 1
            return b"%s%d.%08x\n%s" % (self._prefix, self._next - 1, self._check, events)
        pieces = []
        for event in events.split(b"\n\n")[:-1]:
            if self.has_caught_up:
                pieces.append(b"%s%d.%08x\n%s\n\n" % (self._prefix, self._next, self._check, event))
            elif self._next == self._received.number:
                self._compare()
            self._next += 1
        return b"".join(pieces)

    def check(self, answer: Answer) -> None:
        """Check that the client's last event is among those that are known so far.

        Raises:
            UnknownEventError: it is not; the events after it could not be found.
        """
        if not self.has_caught_up:
            if not answer.is_complete:
                number, last = self._received.number, self._next - 1
                message = f"Event {number} of this answer has not been sent; the last one is {last}."
                raise UnknownEventError(message, param="Last-Event-ID")
            # It is one of the ending, which is not rendered yet.
            self._compare()
        if self._differs:
            message = (
                f"The answer went on without event {self._received.number} as it was sent: another gateway, which did "
                "not have it, has generated it again. Continue after an earlier event, or send the request again."
            )
            raise UnknownEventError(message, param="Last-Event-ID")

    def _compare(self) -> None:
        self._differs = self._received.check not in (None, self._check)


class BackgroundDelivery:
    """Renders events for their effect on `before_end`, and sends nothing: their readers follow the record."""

    def __init__(self, renderer: StreamRenderer, before_end: Callable[[], Awaitable[None]]) -> None:
        self._renderer = renderer
        self._before_end = before_end

    async def deliver(self, answer: Answer, _send: Send) -> None:
        """Wait for the end or the failure of the answer."""
        try:
            while (updates := await answer.next_updates()) is None or updates:
                for update in updates or ():
                    self._renderer.events(update)
            self._renderer.ending(answer.usage)
        except PandoError as error:
            self._renderer.failure(error)
        await answer.conclude(self._before_end)


class WholeDelivery:
    """Collects all updates and sends one body."""

    def __init__(self, renderer: WholeRenderer, before_end: Callable[[], Awaitable[None]] = end_at_once) -> None:
        """Write the body with `renderer`; `before_end` is awaited between rendering and sending it."""
        self._renderer = renderer
        self._before_end = before_end

    async def deliver(self, answer: Answer, send: Send) -> None:
        """Wait for the end of all choices and send them.

        Raises:
            RequestFailedError: the request failed, or has more than MAX_WHOLE_VALUES log probabilities.
        """
        prompts = [PromptScores() for _ in answer.entries]
        pairs = zip(answer.entries, prompts, strict=True)
        choices = [WholeChoice(prompt=prompt) for entry, prompt in pairs for _ in entry.choices]
        values = 0
        while (updates := await answer.next_updates()) is None or updates:
            collect(updates or (), choices)
            values += count_logprobs(updates or ())
            if values > MAX_WHOLE_VALUES:
                raise RequestFailedError(TOO_MANY_VALUES)
        body = self._renderer.body(choices, answer.usage)
        await answer.conclude(self._before_end)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class PiecewiseDelivery:
    """Collects all updates, renders them piecewise so that other tasks can run in between, and sends one body."""

    def __init__(self, renderer: PiecewiseRenderer) -> None:
        self._renderer = renderer

    async def deliver(self, answer: Answer, send: Send) -> None:
        """Wait for the end of all choices and send them; see `Delivery`."""
        choices = [WholeChoice() for entry in answer.entries for _ in entry.choices]
        while (updates := await answer.next_updates()) is None or updates:
            collect(updates or (), choices)
        pieces, written = [], 0
        for piece in self._renderer.pieces(choices, answer.usage):
            pieces.append(piece)
            written += len(piece)
            if written > PIECE_BYTES:
                written = 0
                await asyncio.sleep(0)
        body = b"".join(pieces)
        await answer.conclude(end_at_once)
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
