"""Use of limits, counted in this process; `meters.lua` is the same algorithm for several gateways."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from gateway.quotas.meters import BUSY_WAIT_S, ChargeKind, Level, Limit, MeterReading, Obstacle, Taking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.limits import SubjectLimits
    from gateway.quotas.meters import MeteredAccount

# Idle meters, which equal new ones, are dropped when there are more than this, and more than twice as many as the last
# time: a search takes a microsecond per meter, and names can be invented faster than their meters become idle.
MAX_METERS = 10_000

_Key: TypeAlias = tuple[str, str | None]


class Bucket:
    """The used part of a budget that refills steadily. Times are monotonic seconds.

    It stores the used amount, not the remaining one, so that it stays valid when the limit changes.
    """

    __slots__ = ("_at", "_used")

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now

    def left(self, per_minute: int, now: float) -> float:
        """Return the remaining amount; negative if more was used than had been announced."""
        self._used = max(self._used - (now - self._at) * per_minute / 60, 0.0)
        self._at = now
        return per_minute - self._used

    def wait_s(self, amount: float, per_minute: int, now: float) -> float:
        """Return the seconds until `amount` can be taken, possibly 0. A full bucket suffices for any amount."""
        lacking = min(amount, per_minute) - self.left(per_minute, now)
        return max(lacking, 0.0) * 60 / per_minute

    def take(self, amount: float, per_minute: int, now: float) -> None:
        """Take `amount`; a negative one is given back."""
        self.left(per_minute, now)
        self._used = max(self._used + amount, 0.0)


class Meter:
    """The use of one account, and the number of its open requests."""

    __slots__ = ("_open", "_requests", "_tokens", "quota")

    def __init__(self, quota: SubjectLimits, now: float) -> None:
        self.quota = quota
        self._open = 0
        self._requests = Bucket(now)
        self._tokens = Bucket(now)

    def obstacle(
        self, requests: int, tokens: int, now: float, kind: ChargeKind = ChargeKind.NEW
    ) -> tuple[Limit, float] | None:
        """Return the limit that does not allow these requests and tokens now, and the seconds until it may."""
        quota = self.quota
        if kind is ChargeKind.INHERITED:
            return None
        # A batch larger than the limit is allowed when nothing else is open; otherwise it could never run.
        if quota.concurrent is not None and self._open + requests > max(quota.concurrent, requests * (not self._open)):
            return Limit.CONCURRENT, BUSY_WAIT_S
        if kind is ChargeKind.CONTINUED:
            return None
        if limit := quota.requests_per_minute:
            wait = self._requests.wait_s(requests, limit, now)
            if wait:
                return Limit.REQUESTS, wait
        if limit := quota.tokens_per_minute:
            wait = self._tokens.wait_s(tokens, limit, now)
            if wait:
                return Limit.TOKENS, wait
        return None

    def take(self, requests: int, tokens: int, now: float, kind: ChargeKind = ChargeKind.NEW) -> None:
        """Open `requests` requests that announce `tokens` tokens in all."""
        self._open += requests
        if kind is not ChargeKind.NEW:
            return
        if limit := self.quota.requests_per_minute:
            self._requests.take(requests, limit, now)
        if limit := self.quota.tokens_per_minute:
            self._tokens.take(tokens, limit, now)

    def settle(self, requests: int, tokens: int, now: float) -> None:
        """Close requests that used `tokens` more than announced (less, if negative)."""
        self._open -= requests
        if limit := self.quota.tokens_per_minute:
            self._tokens.take(tokens, limit, now)

    def read(self, now: float) -> MeterReading:
        """Return the remaining amounts."""
        requests, tokens = self.quota.requests_per_minute, self.quota.tokens_per_minute
        return MeterReading(
            Level(requests, self._requests.left(requests, now)) if requests else None,
            Level(tokens, self._tokens.left(tokens, now)) if tokens else None,
        )

    def is_idle(self, now: float) -> bool:
        """Whether the meter equals a new one."""
        reading = self.read(now)
        levels = (reading.requests, reading.tokens)
        return not self._open and all(level is None or level.left >= level.per_minute for level in levels)


class MemoryMeters:
    """Implements `gateway.quotas.meters.Meters` for a single gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[_Key, Meter] = {}
        self._most = MAX_METERS

    @property
    def count(self) -> int:
        """Number of accounts with a meter."""
        return len(self._meters)

    async def take(
        self, accounts: Sequence[MeteredAccount], requests: int, tokens: int, kind: ChargeKind = ChargeKind.NEW
    ) -> Taking:
        """Take `requests` and `tokens` from all accounts, or nothing from any; see `Meters`."""
        now = self._clock()
        meters = [self._meter(account, now) for account in accounts]
        for account, meter in zip(accounts, meters, strict=True):
            found = meter.obstacle(requests, tokens, now, kind)
            if found is not None:
                return Taking([each.read(now) for each in meters], Obstacle(account, *found))
        for meter in meters:
            meter.take(requests, tokens, now, kind)

        def settle(used_tokens: int) -> None:
            for meter in meters:
                meter.settle(requests, used_tokens - tokens, self._clock())

        return Taking([meter.read(now) for meter in meters], settle=settle)

    def _meter(self, account: MeteredAccount, now: float) -> Meter:
        key = (account.tenant, account.subject)
        meter = self._meters.get(key)
        if meter is None:
            if len(self._meters) >= self._most:
                self._meters = {key: meter for key, meter in self._meters.items() if not meter.is_idle(now)}
                self._most = max(MAX_METERS, 2 * len(self._meters))
            meter = self._meters[key] = Meter(account.quota, now)
        meter.quota = account.quota
        return meter
