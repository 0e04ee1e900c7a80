"""A bidirectional stream that is reopened whenever its connection breaks, and how a server accepts it.

A connection can lose messages without breaking, and can be dead for minutes before the system reports it. So messages
are numbered, and the client sends heartbeats, which the server answers. A peer of an earlier version does neither, and
is not held to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc

from common.errors import BrokenStateError, UnavailableError
from common.logs import get_logger
from common.rpc.handshake import check_server, own_build
from common.rpc.options import CONNECT_TIMEOUT_MS
from common.rpc.status import CLOSED_DURING_CALL, describe, is_own_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class NumberedMessage(Protocol):
    """A message with a number within its stream."""

    sequence: int


RequestT = TypeVar("RequestT", bound=NumberedMessage)
ResponseT = TypeVar("ResponseT", bound=NumberedMessage)
# The reason if this side closed the stream, which is logged without a warning.
CLOSED_HERE = "closed here"
# gRPC delivers initial metadata for a refused stream too, before its status; this entry distinguishes them. Its value
# states whether the server numbers its messages and answers heartbeats.
ACCEPTED_KEY = "pando-accepted"
NUMBERED = "numbered"
# The name of the server's process, by which other services find the same one.
PROCESS_KEY = "pando-process"
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.25
# A peer that is up accepts a stream within milliseconds; a longer wait means that its connection is dead.
ACCEPT_TIMEOUT_S = CONNECT_TIMEOUT_MS / 1000
HEARTBEAT_S = 0.5
# Heartbeats without any message from the peer beyond which the connection counts as dead: if another process would do
# the peer's work, and if it can only be waited for. They are counted, not timed, as a
# process that was itself stopped would measure a long time.
SILENT_BEATS_OF_SEVERAL = 2
SILENT_BEATS = 10
# UNIMPLEMENTED: the peer's version does not work with this one.
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A server's answer to the opening of a stream."""

    # Whether it numbers its messages and answers heartbeats.
    is_numbered: bool = False
    # The name of its process; None: it has none, as servers of earlier versions.
    process: str | None = None


@dataclass(frozen=True, slots=True)
class StreamSource(Generic[RequestT, ResponseT]):
    """Opens a link's stream, e.g. `lambda: stub.Submit()`, and replaces a connection that failed silently."""

    open_stream: Callable[[], grpc.aio.StreamStreamCall[RequestT, ResponseT]]
    make_heartbeat: Callable[[], RequestT]
    renew: Callable[[], None] = lambda: None
    # Whether another peer would do this one's work.
    has_others: Callable[[], bool] = lambda: False


class StreamLink(Generic[RequestT, ResponseT]):
    """Keeps one bidirectional stream to a peer open and reopens it whenever it breaks.

    `send` never blocks: messages wait in a bounded queue and are written in order. After a break, the owner must
    repeat messages that were sent but not answered. The callbacks run on the event loop and must not block.

    The stream also breaks if messages were lost or cannot be read, or if the peer is silent; the connection is replaced
    then. A `BrokenStateError` of `on_message` ends `run`.
    """

    def __init__(
        self,
        name: str,
        source: StreamSource[RequestT, ResponseT],
        on_message: Callable[[ResponseT], None],
        *,
        on_connected: Callable[[], None] = lambda: None,
        on_disconnected: Callable[[str], None] = lambda _reason: None,
        max_queued: int = 16_384,
    ) -> None:
        """Prepare the link `name`, which `run` opens."""
        self.name = name
        self.connected = False
        # The name of the process at the other end of the last stream.
        self.process: str | None = None
        self._source = source
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._max_queued = max_queued
        self._silence = Silence()
        self._queue: deque[RequestT] = deque()
        self._queued = asyncio.Event()
        self._refusals = RefusalLog(name)
        self._log = get_logger("link")

    @property
    def silent_beats(self) -> int:
        """Heartbeats since the last message from the peer; 0 for a peer that does not answer them."""
        return self._silence.beats

    def send(self, message: RequestT) -> None:
        """Queue a message for the peer.

        Raises:
            UnavailableError: the peer is unreachable, or so slow that the queue is full.
        """
        if not self.connected:
            raise UnavailableError(f"{self.name} is not reachable", retry_after_ms=1000)
        if len(self._queue) >= self._max_queued:
            raise UnavailableError(f"{self.name} does not keep up", retry_after_ms=1000)
        self._queue.append(message)
        self._queued.set()

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        await keep_connecting(self._run_once)

    async def _run_once(self) -> bool:
        """Open the stream and serve it until it breaks; return whether it was connected."""
        call: grpc.aio.StreamStreamCall[RequestT, ResponseT] | None = None
        reason = CLOSED_HERE
        try:
            call = self._source.open_stream()
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                acceptance = await wait_until_accepted(call)
            self._silence = Silence(is_numbered=acceptance.is_numbered, has_others=self._source.has_others)
            self.process = acceptance.process
            self.connected = True
            self._refusals.clear()
            self._log.info("link.connected", link=self.name)
            self._on_connected()
            reason = await self._serve(call)
        except TimeoutError:
            self._source.renew()
        except grpc.RpcError as error:
            reason = describe(error)
            self._refusals.note(error)
        except UnavailableError as error:
            reason = str(error)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            # Another user of the channel has closed it, and has or will have opened another one.
            reason = CLOSED_DURING_CALL
        finally:
            was_connected, self.connected = self.connected, False
            if call is not None:
                call.cancel()
            self._queue.clear()
            if was_connected:
                log = self._log.info if reason is CLOSED_HERE else self._log.warning
                log("link.broken", link=self.name, reason=reason)
                self._on_disconnected(reason)
        return was_connected

    async def _serve(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> str:
        writer = asyncio.create_task(self._write(call))
        ends = [asyncio.create_task(self._read(call)), asyncio.create_task(self._beat())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            tasks = (writer, *ends)
            for task in tasks:
                task.cancel()
            # Not `await task`: a cancellation of this task in the meantime could not be distinguished from its own.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> str:
        numbers = MessageNumbers()
        try:
            async for message in call:
                numbers.check(message.sequence)
                self._silence.note(message.sequence)
                self._on_message(message)
        except UnavailableError as error:
            self._source.renew()
            return str(error)
        except grpc.RpcError as error:
            return describe(error)
        except BrokenStateError:
            raise
        except Exception as error:  # noqa: BLE001  (without TLS, a bit may flip in any field)
            self._log.exception("link.unreadable", link=self.name)
            self._source.renew()
            return unreadable(error)
        return "closed by the peer"

    async def _beat(self) -> str:
        """Send heartbeats until the peer is silent."""
        while not self._silence.is_too_long:
            if len(self._queue) < self._max_queued:
                self._queue.append(self._source.make_heartbeat())
                self._queued.set()
            await asyncio.sleep(HEARTBEAT_S)
            self._silence.beat()
        self._source.renew()
        return self._silence.reason

    async def _write(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> None:
        written = 0
        while True:
            while self._queue:
                message = self._queue.popleft()
                message.sequence = written = written + 1
                await call.write(message)
            self._queued.clear()
            await self._queued.wait()


class MessageNumbers:
    """Checks the numbers of one direction of a stream; messages of peers that do not number are accepted."""

    def __init__(self) -> None:
        self._last = 0

    def check(self, sequence: int) -> None:
        """Accept the next message.

        Raises:
            UnavailableError: messages before it were lost, or it was received twice.
        """
        if not sequence:
            return
        if sequence != self._last + 1:
            raise UnavailableError(f"message {sequence} of the stream followed message {self._last}")
        self._last = sequence


class Silence:
    """Counts heartbeats without a message from a peer; peers that do not number may be silent."""

    def __init__(
        self,
        limit: int = SILENT_BEATS,
        *,
        is_numbered: bool = False,
        has_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start with a peer that has sent nothing; more than `limit` beats without a message are too long.

        If `has_others`, as another process would do its work, `SILENT_BEATS_OF_SEVERAL` is the limit. `is_numbered`:
        the peer has said that it numbers its messages.
        """
        self._limit = limit
        self._has_others = has_others
        self._beats = 0
        self._expects_messages = is_numbered

    @property
    def beats(self) -> int:
        """Heartbeats since the last message, of peers that number."""
        return self._beats if self._expects_messages else 0

    @property
    def is_too_long(self) -> bool:
        limit = SILENT_BEATS_OF_SEVERAL if self._has_others() else self._limit
        return self._expects_messages and self._beats > limit

    @property
    def reason(self) -> str:
        """Why the stream was broken off."""
        return f"no message for {self._beats * HEARTBEAT_S:g} s"

    def note(self, sequence: int) -> None:
        """A message has arrived."""
        self._beats = 0
        self._expects_messages = self._expects_messages or bool(sequence)

    def beat(self) -> None:
        """A heartbeat interval has passed."""
        self._beats += 1


def unreadable(error: Exception) -> str:
    """Return the reason of a break after a message that could not be decoded or taken in."""
    return f"a message could not be read: {type(error).__name__}"


async def accept_stream(
    context: grpc.aio.ServicerContext[Any, Any], *, is_numbered: bool = False, process: str | None = None
) -> None:
    """Confirm to the client that its stream is accepted, once everything that it may rely on exists.

    `is_numbered`: messages are numbered and heartbeats answered, so that the client may treat silence as a break.
    `process` names this process, for servers of which there may be several.
    """
    name = () if process is None else ((PROCESS_KEY, process),)
    accepted = (ACCEPTED_KEY, NUMBERED if is_numbered else "1")
    await context.send_initial_metadata((accepted, *name, *own_build().metadata))


async def wait_until_accepted(
    call: grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any],
) -> Acceptance:
    """Wait until the peer has accepted a stream with `accept_stream`, or has ended it.

    Raises:
        grpc.aio.AioRpcError: the peer is unreachable, has refused the stream, or its version is too old or too new.
    """
    metadata = dict(await call.initial_metadata())
    if ACCEPTED_KEY not in metadata:
        await call.code()
    await call.wait_for_connection()
    check_server(metadata)
    process = metadata.get(PROCESS_KEY)
    return Acceptance(metadata.get(ACCEPTED_KEY) == NUMBERED, None if process is None else str(process))


class RefusalLog:
    """Logs refusals by a peer, which retries would otherwise hide; repeated refusals for one reason are logged once."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._reason: str | None = None

    def note(self, error: grpc.RpcError) -> None:
        """Log the error of a connection attempt if it is a new refusal."""
        if not isinstance(error, grpc.aio.AioRpcError) or error.code() not in REFUSALS:
            return
        reason = describe(error)
        if reason != self._reason:
            self._reason = reason
            get_logger("link").error("link.refused", link=self._peer, reason=reason)

    def clear(self) -> None:
        """Reset the log after the peer has accepted a connection."""
        self._reason = None


async def keep_connecting(
    run_once: Callable[[], Awaitable[bool]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Call `run_once` repeatedly until cancelled, with growing pauses while the peer is unreachable.

    After an attempt that has taken long itself, the pause is short.
    `run_once` connects, serves the connection until it breaks, and returns whether it was connected.
    """
    loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
    while True:
        began_at = loop.time()
        was_connected = await run_once()
        pause = FIRST_PAUSE_S if was_connected else min(pause * 2, MAX_PAUSE_S)
        await sleep(pause if loop.time() - began_at < pause else FIRST_PAUSE_S)
