"""A gateway over a fake pipeline in this process, for pages whose states a live deployment reaches only by chance."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.gateway.listening import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.gateway.support import FakedGateway


@contextmanager
def serving(make: Callable[[], FakedGateway]) -> Iterator[str]:
    """Serve the gateway that `make` returns in a thread of its own, and yield its address."""
    found: Future[str] = Future()
    stopping = threading.Event()

    async def run() -> None:
        async with listening(make(), drain_s=0) as port:
            found.set_result(f"http://127.0.0.1:{port}")
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield found.result(60)
    finally:
        stopping.set()
        thread.join()
