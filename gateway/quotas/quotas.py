"""Holds tenants and users to their limits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.errors import QueueFullError
from gateway.quotas.meter import Meter, rate_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.types import Subject
    from gateway.quotas.rules import Quota, Rules

# Beyond so many meters those that show nothing are dropped.
MAX_METERS = 10_000


class RulesSource(Protocol):
    """Where limits are written down; they may change at any time."""

    @property
    def value(self) -> Rules:
        """The limits in force."""


@dataclass(slots=True)
class Lease:
    """What one HTTP request has taken; `settle` must be called once."""

    requests: int
    tokens: int
    meters: list[Meter]
    clock: Callable[[], float]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell the client what is left."""
        return rate_headers(self.meters, self.clock())

    def settle(self, used_tokens: int) -> None:
        """Close the request, and correct what it announced by what it has used."""
        for meter in self.meters:
            meter.settle(self.requests, used_tokens - self.tokens, self.clock())


@dataclass(frozen=True, slots=True)
class Charge:
    """What an HTTP request is about to take."""

    subject: Subject
    requests: int
    tokens: int


class Quotas:
    """Knows what everybody has used of late. A limit that changes begins anew."""

    def __init__(self, rules: RulesSource | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Hold everybody to `rules`; None sets no limits."""
        self._rules = rules
        self._clock = clock
        self._meters: dict[tuple[str, str | None], Meter] = {}

    def max_context(self, subject: Subject) -> int | None:
        """Return the longest context, prompt and output together, that `subject` may use."""
        limits = [quota.max_context for quota in self._quotas(subject).values() if quota.max_context is not None]
        return min(limits, default=None)

    def take(self, charge: Charge) -> Lease:
        """Take what `charge` says, from the tenant and from the user, or nothing at all.

        Raises:
            QueueFullError: it is more than is left.
        """
        now = self._clock()
        subject = charge.subject
        meters = [self._meter(key, quota, now) for key, quota in self._quotas(subject).items()]
        for whose, meter in zip(("organization", "user"), meters, strict=False):
            obstacle = meter.obstacle(charge.requests, charge.tokens, now)
            if obstacle is not None:
                limit, wait_s = obstacle
                message = f"Rate limit reached for this {whose}: {limit}. Please try again in {wait_s:.3g} s."
                raise LimitedError(message, math.ceil(wait_s * 1000), rate_headers(meters, now))
        for meter in meters:
            meter.take(charge.requests, charge.tokens, now)
        return Lease(charge.requests, charge.tokens, meters, self._clock)

    def _quotas(self, subject: Subject) -> dict[tuple[str, str | None], Quota]:
        if self._rules is None:
            return {}
        quota = self._rules.value.of(subject.tenant)
        return {(subject.tenant, None): quota, (subject.tenant, subject.name): quota.each_user}

    def _meter(self, key: tuple[str, str | None], quota: Quota, now: float) -> Meter:
        meter = self._meters.get(key)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._meters = {key: meter for key, meter in self._meters.items() if not meter.is_idle(now)}
            meter = self._meters[key] = Meter(quota, now)
        elif meter.quota != quota:
            meter.adopt(quota, now)
        return meter


class LimitedError(QueueFullError):
    """A limit is reached; `headers` tell the client how far."""

    def __init__(self, message: str, retry_after_ms: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Keep the message, when to try again, and the headers."""
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.headers = headers
