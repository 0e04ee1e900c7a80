"""A bidirectional stream that is reopened whenever its connection breaks, and how a server accepts it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from common.errors import UnavailableError
from common.logs import get_logger
from common.rpc.status import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
# The reason if this side closed the stream, which is logged without a warning.
CLOSED_HERE = "closed here"
# gRPC delivers initial metadata for a refused stream too, before its status; this entry distinguishes them.
ACCEPTED_KEY = "pando-accepted"
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


class StreamLink(Generic[RequestT, ResponseT]):
    """Keeps one bidirectional stream to a peer open and reopens it whenever it breaks.

    `send` never blocks: messages wait in a bounded queue and are written in order. After a break, the owner must
    repeat messages that were sent but not answered. The callbacks run on the event loop and must not block.
    """

    def __init__(
        self,
        name: str,
        open_stream: Callable[[], grpc.aio.StreamStreamCall[RequestT, ResponseT]],
        on_message: Callable[[ResponseT], None],
        *,
        on_connected: Callable[[], None] = lambda: None,
        on_disconnected: Callable[[str], None] = lambda _reason: None,
        max_queued: int = 16_384,
    ) -> None:
        """Prepare the link `name`; `open_stream` starts the call, e.g. `lambda: stub.Submit()`."""
        self.name = name
        self.connected = False
        self._open_stream = open_stream
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._max_queued = max_queued
        self._queue: deque[RequestT] = deque()
        self._queued = asyncio.Event()
        self._refusals = RefusalLog(name)
        self._log = get_logger("link")

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
        call = self._open_stream()
        reason = CLOSED_HERE
        try:
            await wait_until_accepted(call)
            self.connected = True
            self._refusals.clear()
            self._log.info("link.connected", link=self.name)
            self._on_connected()
            reason = await self._serve(call)
        except grpc.RpcError as error:
            reason = describe(error)
            self._refusals.note(error)
        finally:
            was_connected, self.connected = self.connected, False
            call.cancel()
            self._queue.clear()
            if was_connected:
                log = self._log.info if reason is CLOSED_HERE else self._log.warning
                log("link.broken", link=self.name, reason=reason)
                self._on_disconnected(reason)
        return was_connected

    async def _serve(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> str:
        writer = asyncio.create_task(self._write(call))
        try:
            async for message in call:
                self._on_message(message)
        except grpc.RpcError as error:
            return describe(error)
        finally:
            writer.cancel()
            # Not `await writer`: a cancellation of this task in the meantime could not be distinguished from the
            # writer's own.
            await asyncio.gather(writer, return_exceptions=True)
        return "closed by the peer"

    async def _write(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> None:
        while True:
            while self._queue:
                await call.write(self._queue.popleft())
            self._queued.clear()
            await self._queued.wait()


async def accept_stream(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Confirm to the client that its stream is accepted, once everything that it may rely on exists."""
    await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))


async def wait_until_accepted(call: grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Wait until the peer has accepted a stream with `accept_stream`, or has ended it.

    Raises:
        grpc.aio.AioRpcError: the peer is unreachable or has refused the stream.
    """
    if ACCEPTED_KEY not in dict(await call.initial_metadata()):
        await call.code()
    await call.wait_for_connection()


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

    `run_once` connects, serves the connection until it breaks, and returns whether it was connected.
    """
    pause = FIRST_PAUSE_S
    while True:
        was_connected = await run_once()
        pause = FIRST_PAUSE_S if was_connected else min(pause * 2, MAX_PAUSE_S)
        await sleep(pause)
