"""The frame of a service process: event loop, signals, orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.host import keep_freed_memory
from common.logs import configure_logging, get_logger
from common.metric_names import exposed
from common.metrics import BUILD_INFO, start_metrics_server
from common.rpc.handshake import own_build
from common.tracing import close_tracing, configure_tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.settings import Settings

DRAIN_INTERVAL_S = 0.05
# A single interrupt may arrive as two signals: `timeout`, `make` and terminals signal a process and its group.
SAME_INTERRUPT_S = 1.0
# Allocations after which Python's cyclic garbage collector runs; its own default is 700, which one step of 256 rows
# exceeds.
NEW_OBJECTS = 20_000
# Exit status of a service whose configuration is refused once it runs, perhaps by a worker (EX_CONFIG in sysexits.h).
REFUSED_EXIT = 78


class Interrupts:
    """Recognises a person's second SIGINT among repeated signals to end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._first_at: float | None = None

    def mean_now(self, number: signal.Signals) -> bool:
        """Record a signal; return whether it asks for the end at once."""
        if number is not signal.SIGINT:
            return False
        if self._first_at is None:
            self._first_at = self._clock()
        return self._clock() - self._first_at > SAME_INTERRUPT_S


def run_service(
    name: str,
    settings: Settings,
    metrics_port: int | None,
    main: Callable[[asyncio.Event], Awaitable[None]],
) -> None:
    """Run `main` until it returns. SIGTERM and SIGINT set the event passed to it, so that it can drain.

    Further ones have no effect, as systemd and scripts repeat them, except a second SIGINT after a second, by a person,
    which ends the process at once. SIGTERM stays ignored if it was ignored at the start. A ConfigurationError is
    logged and ends the process with `REFUSED_EXIT`.
    """
    configure_logging(name, settings.log)
    # Requests with images are copied some times on their way.
    keep_freed_memory()
    logger = get_logger("runtime")
    build = own_build()
    BUILD_INFO.labels(build.version, build.protocol).set(1)
    try:
        if metrics_port is not None:
            port = start_metrics_server(metrics_port, settings.metrics.host, exposed(REGISTRY, settings))
            logger.info("metrics.listening", host=settings.metrics.host, port=port)
        configure_tracing(name, settings.tracing)
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_run(name, main))
    except ConfigurationError as error:
        logger.error("service.misconfigured", reason=str(error))
        sys.exit(REFUSED_EXIT)
    finally:
        close_tracing()
    logger.info("service.stopped")


def collect_garbage_rarely() -> None:
    """Run the cyclic garbage collector rarely, and never over the objects that exist now; call it after all imports.

    Reference counts free nearly all objects of services. With Python's defaults, the collector takes a sixth of the
    time of a gateway with 1,024 streams, in pauses of up to 0.4 s.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


async def drained(is_idle: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `is_idle` returns True, for at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_idle():  # noqa: ASYNC110  (the unfinished work has no event to wait for)
                await asyncio.sleep(DRAIN_INTERVAL_S)


async def _run(name: str, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    interrupts = Interrupts(loop.time)

    def stop(number: signal.Signals) -> None:
        if not stopping.is_set():
            get_logger("runtime").info("service.stopping", signal=number.name)
            stopping.set()
        if interrupts.mean_now(number):
            loop.remove_signal_handler(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN or number is signal.SIGINT:
            loop.add_signal_handler(number, stop, number)
    get_logger("runtime").info(
        "service.starting", name=name, version=own_build().version, protocol=own_build().protocol
    )
    await main(stopping)
