"""Reconnection of links that must stay connected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from common.logs import get_logger
from common.rpc.status import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
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
