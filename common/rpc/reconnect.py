"""Reconnection of links that must stay connected."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from common.logs import get_logger
from common.rpc.status import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
# How long after its metadata the status of a refused stream may arrive; both are sent in the same frame.
VERDICT_S = 0.01
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


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


async def wait_until_accepted(call: grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Wait until the peer has accepted a stream, that is, has sent its initial metadata.

    Raises:
        grpc.aio.AioRpcError: the peer is unreachable or has refused the stream.
    """
    await call.wait_for_connection()
    # On a refusal, gRPC delivers the (empty) metadata before the status, so metadata alone do not mean acceptance.
    # Not `wait_for`, which drops a cancellation that comes together with the status (until Python 3.12).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(VERDICT_S):
            await call.code()
        await call.wait_for_connection()


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
