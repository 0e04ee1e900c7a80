"""How a connection that must always be there comes back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0


async def keep_connecting(
    run_once: Callable[[], Awaitable[bool]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Call `run_once` again and again until cancelled, with pauses that grow while the peer stays away.

    `run_once` connects, serves the connection until it breaks, and returns whether there had been one.
    """
    pause = FIRST_PAUSE_S
    while True:
        was_connected = await run_once()
        pause = FIRST_PAUSE_S if was_connected else min(pause * 2, MAX_PAUSE_S)
        await sleep(pause)
