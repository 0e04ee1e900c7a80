"""Connections to a state server, as several gateways have them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from gateway.state.server import StateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

_numbers = itertools.count()


def new_prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"test{next(_numbers)}"


def new_metrics() -> GatewayMetrics:
    return GatewayMetrics(CollectorRegistry())


@asynccontextmanager
async def state_server(
    url: str, prefix: str, *, timeout_s: float = 5.0, metrics: GatewayMetrics | None = None, probes: bool = True
) -> AsyncIterator[StateServer]:
    """Yield a connection of one gateway."""
    server = StateServer(url, metrics or new_metrics(), prefix=prefix, timeout_s=timeout_s)
    async with working(*([server.run] if probes else [])):
        yield server
    await server.close()


@asynccontextmanager
async def working(*background: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run work in the background; a failure of it fails the test."""
    running = [asyncio.create_task(work()) for work in background]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
