"""Counting the use of limits: the interface of both implementations, and their common parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.limits import SubjectLimits

# The end of an open request cannot be predicted; a client that has to wait for one is advised to retry after this long.
BUSY_WAIT_S = 1.0


class Limit(Enum):
    """A kind of limit; the value completes the sentence in an error."""

    CONCURRENT = "requests at the same time"
    REQUESTS = "requests per minute"
    TOKENS = "tokens per minute"


class ChargeKind(Enum):
    """Which limits apply to requests."""

    # All.
    NEW = "take"
    # That of open requests only, because the answer that they continue has been charged; the others are not used.
    CONTINUED = "continue"
    # None: they continue an answer whose gateway has died and still holds its place.
    INHERITED = "inherit"


@dataclass(frozen=True, slots=True)
class MeteredAccount:
    """A tenant, or one of its subjects, and its limits."""

    tenant: str
    subject: str | None
    quota: SubjectLimits

    @property
    def needs_lease(self) -> bool:
        """Whether the end of a request changes the remaining amounts."""
        return self.quota.concurrent is not None or self.quota.tokens_per_minute is not None

    @property
    def is_limited(self) -> bool:
        """Whether any limit requires counting."""
        return self.needs_lease or self.quota.requests_per_minute is not None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The exceeded limit of an account, and the seconds until a retry may succeed."""

    account: MeteredAccount
    limit: Limit
    wait_s: float

    @property
    def message(self) -> str:
        """The error message for the client."""
        quota = self.account.quota
        allowed = {
            Limit.CONCURRENT: quota.concurrent,
            Limit.REQUESTS: quota.requests_per_minute,
            Limit.TOKENS: quota.tokens_per_minute,
        }
        whose = "organization" if self.account.subject is None else "user"
        return (
            f"Rate limit reached for this {whose}: {allowed[self.limit]} {self.limit.value}. "
            f"Please try again in {self.wait_s:.3g} s."
        )


@dataclass(frozen=True, slots=True)
class Level:
    """The rest of a minute's budget; negative if more was used than had been announced."""

    per_minute: int
    left: float

    @property
    def full_in_s(self) -> float:
        """Seconds until the budget is full again."""
        return (self.per_minute - self.left) * 60 / self.per_minute


@dataclass(frozen=True, slots=True)
class MeterReading:
    """The levels of one account; None where it has no such limit."""

    requests: Level | None
    tokens: Level | None


def ignore_end(_used_tokens: int) -> None:
    """The default `settle`, for requests whose end does not change the remaining amounts."""


@dataclass(frozen=True, slots=True)
class Taking:
    """The result of an attempt to take: everything was taken, or, with an `obstacle`, nothing.

    If there was no obstacle, `settle` must be called once with the number of tokens used.
    """

    readings: Sequence[MeterReading]
    obstacle: Obstacle | None = None
    settle: Callable[[int], None] = ignore_end


class Meters(Protocol):
    """Counts the use of limits."""

    async def take(
        self, accounts: Sequence[MeteredAccount], requests: int, tokens: int, kind: ChargeKind = ChargeKind.NEW
    ) -> Taking:
        """Take `requests` and `tokens` from all accounts, or nothing from any.

        Unless they are new, requests only become open.

        Raises:
            UnavailableError: the use cannot be counted now.
        """


def rate_headers(readings: Sequence[MeterReading]) -> list[tuple[bytes, bytes]]:
    """Return the `x-ratelimit-*` headers; of several limits, those of the one with the least left."""
    headers = []
    kinds = {
        b"requests": [reading.requests for reading in readings if reading.requests is not None],
        b"tokens": [reading.tokens for reading in readings if reading.tokens is not None],
    }
    for kind, levels in kinds.items():
        if not levels:
            continue
        nearest = min(levels, key=lambda level: level.left)
        headers += [
            (b"x-ratelimit-limit-" + kind, b"%d" % nearest.per_minute),
            (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, math.floor(nearest.left))),
            (b"x-ratelimit-reset-" + kind, b"%.3fs" % nearest.full_in_s),
        ]
    return headers
