"""Use of limits, counted for all gateways together in Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.logs import get_logger
from common.lua_scripts import LuaScript
from gateway.quotas.meters import BUSY_WAIT_S, ChargeKind, Level, Limit, MeterReading, Obstacle, Taking
from gateway.state.server import StateAwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

    from gateway.metrics import GatewayMetrics
    from gateway.quotas.meters import MeteredAccount, Meters
    from gateway.state.server import StateServer

# Lifetime of the leases of open requests, which a dead gateway keeps until then. They are renewed three times as often.
LEASE_S = 30.0
BATCH = 100
LEASES_A_CALL = 500
# Ends of requests that are not yet reported to the server; beyond this the oldest are dropped, and their leases expire.
MAX_SETTLEMENTS = 100_000


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a request: its lease, its tokens in excess of those announced, and the accounts with that lease."""

    lease: str
    tokens: int
    accounts: tuple[MeteredAccount, ...]


class RedisMeters:
    """Implements `gateway.quotas.meters.Meters` for several gateways; each take is one call of an atomic script.

    While the server is unavailable, either every take fails (`own` is None), or this gateway counts on its own with
    `own`: each of N gateways then allows as much as all of them together should.
    """

    def __init__(
        self,
        state: StateServer,
        own: Meters | None,
        metrics: GatewayMetrics,
        *,
        clock: Callable[[], float] | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        """Count at `state`, by its clock; tests replace that by `clock` (in seconds)."""
        self._state = state
        self._own = own
        self._metrics = metrics
        self._clock = clock
        self._lease_s = lease_s
        self._script = LuaScript(state.redis, "gateway.quotas", "meters.lua")
        self._numbers = itertools.count()
        self._open: dict[str, tuple[MeteredAccount, ...]] = {}
        self._settlements: deque[Settlement] = deque(maxlen=MAX_SETTLEMENTS)
        self._wake = asyncio.Event()
        self._log = get_logger("quotas")

    async def take(
        self, accounts: Sequence[MeteredAccount], requests: int, tokens: int, kind: ChargeKind = ChargeKind.NEW
    ) -> Taking:
        """Take `requests` and `tokens` from all accounts, or nothing from any; see `Meters`.

        Raises:
            StateAwayError: the server is unavailable, and `own` is None.
        """
        if not accounts:
            return Taking(())
        try:
            return await self._take(kind.value, accounts, requests, tokens)
        except StateAwayError:
            if self._own is None:
                raise
            self._metrics.unshared_limits.inc()
            return await self._own.take(accounts, requests, tokens, kind)

    async def run(self) -> None:
        """Renew leases and report ends of requests until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at):
                    await self._wake.wait()
            self._wake.clear()
            await self._state.wait_up()
            try:
                # Sequentially: a renewal must not restore a lease that has ended in the meantime.
                if loop.time() >= renew_at:
                    await self._renew()
                    renew_at = loop.time() + self._lease_s / 3
                await self._settle()
            except StateAwayError:
                self._wake.set()

    async def flush(self) -> None:
        """Report all ends of requests that are still unreported, if the server is available."""
        with contextlib.suppress(StateAwayError):
            await self._settle()

    async def _take(self, operation: str, accounts: Sequence[MeteredAccount], requests: int, tokens: int) -> Taking:
        lease = f"{requests}:{self._state.gateway_id}-{next(self._numbers)}"
        leasing = tuple(account for account in accounts if account.needs_lease)
        keys = [key for account in accounts for key in self._keys(account)]
        limits = [limit or 0 for account in accounts for limit in _limits(account)]
        lasts = round(self._lease_s * 1e6)
        arguments: list[str | int] = [operation, self._now, lease, lasts, requests, tokens, *limits]
        try:
            readings, obstacle = await self._state.call(lambda redis: self._ask(redis, keys, arguments, accounts))
        except (StateAwayError, asyncio.CancelledError) as error:
            # The server may have executed the command nevertheless.
            if leasing and getattr(error, "was_sent", True):
                self._end(Settlement(lease, -tokens, leasing))
            raise
        if obstacle is not None or not leasing:
            return Taking(readings, obstacle)
        self._open[lease] = leasing
        return Taking(readings, settle=lambda used: self._end(Settlement(lease, used - tokens, leasing)))

    async def _ask(
        self,
        redis: Redis,
        keys: Sequence[str],
        arguments: Sequence[str | int],
        accounts: Sequence[MeteredAccount],
    ) -> tuple[list[MeterReading], Obstacle | None]:
        """Return the remainder of each account and the obstacle to the request; a damaged reply raises any error."""
        forbids, limit, wait_s, *levels = map(_text, await self._call(redis, keys, arguments))
        readings = [
            MeterReading(
                _level(account.quota.requests_per_minute, levels[2 * index]),
                _level(account.quota.tokens_per_minute, levels[2 * index + 1]),
            )
            for index, account in enumerate(accounts)
        ]
        if not int(forbids):
            return readings, None
        reached = Limit[limit]
        wait = BUSY_WAIT_S if reached is Limit.CONCURRENT else float(wait_s)
        return readings, Obstacle(accounts[int(forbids) - 1], reached, wait)

    def _end(self, settlement: Settlement) -> None:
        self._open.pop(settlement.lease, None)
        self._settlements.append(settlement)
        self._wake.set()

    async def _settle(self) -> None:
        while self._settlements:
            batch = list(itertools.islice(self._settlements, BATCH))
            await self._state.call(lambda redis, batch=batch: self._settle_batch(redis, batch))  # type: ignore[misc]
            for done in batch:
                # The deque may have dropped its oldest entries in the meantime.
                if self._settlements and self._settlements[0] is done:
                    self._settlements.popleft()

    async def _settle_batch(self, redis: Redis, batch: Sequence[Settlement]) -> None:
        async with redis.pipeline(transaction=False) as pipeline:
            for one in batch:
                keys = [key for account in one.accounts for key in self._keys(account)]
                limits = [account.quota.tokens_per_minute or 0 for account in one.accounts]
                await self._call(pipeline, keys, ["settle", self._now, one.lease, one.tokens, *limits])
            await pipeline.execute()

    async def _renew(self) -> None:
        leases: dict[tuple[str, str], list[str]] = {}
        for lease, accounts in self._open.items():
            for account in accounts:
                leases.setdefault(self._keys(account), []).append(lease)
        for keys, names in leases.items():
            for first in range(0, len(names), LEASES_A_CALL):
                arguments = ["renew", self._now, round(self._lease_s * 1e6), *names[first : first + LEASES_A_CALL]]
                await self._state.call(
                    lambda redis, keys=keys, arguments=arguments: self._call(redis, keys, arguments)  # type: ignore[misc]
                )

    async def _call(
        self, client: Redis | Pipeline, keys: Sequence[str], arguments: Sequence[str | int]
    ) -> list[bytes | int]:
        # In a pipeline, this is not the answer yet.
        answer: list[bytes | int] = await self._script(keys=keys, args=arguments, client=client)
        return answer

    @property
    def _now(self) -> str:
        return "" if self._clock is None else str(round(self._clock() * 1e6))

    def _keys(self, account: MeteredAccount) -> tuple[str, str]:
        """Return the keys of an account. Names are hashed, so that no name can produce another account's key.

        The braces keep the keys of a tenant and its subjects in one slot of a cluster.
        """
        whose = "tenant" if account.subject is None else f"subject:{_digest(account.subject)}"
        key = f"{self._state.prefix}:limits:{{{_digest(account.tenant)}}}:{whose}"
        return key, f"{key}:leases"


def _limits(account: MeteredAccount) -> tuple[int | None, int | None, int | None]:
    quota = account.quota
    return quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent


def _text(value: bytes | int) -> str:
    return str(value) if isinstance(value, int) else value.decode()


def _level(per_minute: int | None, left: str) -> Level | None:
    return None if per_minute is None or not left else Level(per_minute, float(left))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
