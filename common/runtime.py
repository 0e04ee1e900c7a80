"""How a service process runs: event loop, signals, orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

from common.errors import ConfigurationError
from common.logs import configure_logging, get_logger
from common.metrics import start_metrics_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.settings import LogSettings

DRAIN_INTERVAL_S = 0.05


def run_service(
    name: str,
    log: LogSettings,
    main: Callable[[asyncio.Event], Awaitable[None]],
    metrics_port: int | None = None,
    metrics_host: str = "0.0.0.0",
) -> None:
    """Run `main` until it returns; SIGTERM and SIGINT set the event it is given, so that it can drain.

    A second signal ends the process at once. A ConfigurationError is logged and ends it with status 1.
    """
    configure_logging(name, log)
    logger = get_logger("runtime")
    try:
        if metrics_port is not None:
            logger.info("metrics.listening", port=start_metrics_server(metrics_port, metrics_host))
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_run(name, main))
    except ConfigurationError as error:
        logger.error("service.misconfigured", reason=str(error))
        sys.exit(1)
    logger.info("service.stopped")


async def drained(is_idle: Callable[[], bool], timeout_s: float) -> None:
    """Wait until there is nothing left to finish, for at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_idle():  # noqa: ASYNC110  (what is being finished knows no events)
                await asyncio.sleep(DRAIN_INTERVAL_S)


async def _run(name: str, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        get_logger("runtime").info("service.stopping", signal=number.name)
        stopping.set()
        for handled in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(handled)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    get_logger("runtime").info("service.starting", name=name)
    await main(stopping)
