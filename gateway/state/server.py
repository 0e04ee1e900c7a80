"""The Redis or Valkey server that several gateways share."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from typing import TYPE_CHECKING, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import ConfigurationError, UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.metrics import GatewayMetrics

T = TypeVar("T")

SCHEMES = ("redis://", "rediss://", "unix://")
CONNECTIONS = 64
# Commands at a time; the other connections are for probes and subscriptions.
COMMANDS = CONNECTIONS - 4
PROBE_INTERVAL_S = 0.5
# A gateway whose last probe is older counts as dead: other gateways may take over its answers.
ALIVE_S = 3.0
RETRY_AFTER_MS = 1000
# Seconds after which the server counts as unreachable; no request waits for it until it answers again.
TIMEOUT_S = 1.0
# The kernel closes a TCP connection whose peer has silently vanished, so that a subscription does not wait forever.
KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


class StateAwayError(UnavailableError):
    """The server does not answer. `was_sent`: the command was sent, so it may have been executed."""

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__(
            "The state that the gateways share is not available; try again soon.", retry_after_ms=RETRY_AFTER_MS
        )
        self.was_sent = was_sent


class StateServer:
    """A connection pool with a circuit breaker.

    The first failed or late answer marks the server as unavailable. From then on every call fails immediately, until a
    background probe has written to the server again.
    """

    def __init__(self, url: str, metrics: GatewayMetrics, *, prefix: str, timeout_s: float) -> None:
        """Prepare connections to `url` without opening any. All keys and channels begin with `prefix`.

        Raises:
            ConfigurationError: `url` is not the URL of a Redis server.
        """
        self.prefix = prefix
        self.timeout_s = timeout_s
        # Distinguishes this process from other gateways, and from itself after a restart.
        self.gateway_id = secrets.token_hex(8)
        self.redis = Redis(connection_pool=_open_pool(url, timeout_s))
        # The time in which a command waits for others does not count as the server's: a burst of one client's requests
        # would make the server count as unavailable for all.
        self._turns = asyncio.Semaphore(COMMANDS)
        self._up = asyncio.Event()
        self._up.set()
        self._away_since = 0.0
        self._log = get_logger("state")
        self._connected = metrics.connected.labels("state", "")

    @property
    def is_up(self) -> bool:
        """Whether calls are sent to the server."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        """Wait until `is_up`."""
        await self._up.wait()

    async def call(self, command: Callable[[Redis], Awaitable[T]]) -> T:
        """Return the result of `command`, which includes reading the reply.

        Raises:
            StateAwayError: the server answers with an error, unintelligibly or not in time.
        """
        async with self._turns:
            if not self._up.is_set():
                raise StateAwayError(was_sent=False)
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await command(self.redis)
            except Exception as error:
                # Not only errors of the library: uvloop raises RuntimeError for a connection that has just been reset,
                # and a reply with a flipped bit may raise anything.
                self._note_away(error)
                raise StateAwayError(was_sent=True) from error

    def probe_key(self, gateway_id: str) -> str:
        """Return the key that a gateway's probes write, which exists while the gateway is alive."""
        return f"{self.prefix}:probe:{gateway_id}"

    async def run(self) -> None:
        """Probe the server until cancelled."""
        key = self.probe_key(self.gateway_id)
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    # A write, because a replica, or a server that is out of memory, answers PING but cannot be used.
                    await self.redis.set(key, b"", px=round(ALIVE_S * 1000))
            except Exception as error:  # noqa: BLE001  (as in `call`)
                self._note_away(error)
            else:
                self._note_up()
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def close(self) -> None:
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()

    def _note_away(self, error: Exception) -> None:
        self._connected.set(0)
        if self._up.is_set():
            self._up.clear()
            self._away_since = time.monotonic()
            reason = str(error) or type(error).__name__
            is_expected = isinstance(error, (RedisError, OSError))  # TimeoutError is an OSError
            self._log.error("state.away", reason=reason, exc_info=None if is_expected else error)

    def _note_up(self) -> None:
        self._connected.set(1)
        if not self._up.is_set():
            self._up.set()
            self._log.info("state.back", seconds=round(time.monotonic() - self._away_since, 1))


def _open_pool(url: str, timeout_s: float) -> BlockingConnectionPool:
    if not url.startswith(SCHEMES):
        raise ConfigurationError(f"gateway.state.url should be memory, or a URL that begins with {', '.join(SCHEMES)}")
    tcp = {} if url.startswith("unix://") else {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            # `call` sets deadlines. The library's own timeouts swallow cancellations on Python 3.11
            # (`asyncio.wait_for`).
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            **tcp,
        )
        # Raises an error for unknown parameters in the URL; does not connect.
        pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py has no annotation there
    except (TypeError, ValueError) as error:
        # The error's own message may quote the URL, which may contain a password.
        raise ConfigurationError("gateway.state.url is not a URL of a Redis or Valkey server") from error
    return pool
