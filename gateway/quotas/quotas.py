"""Holds tenants and users to their limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import QueueFullError
from gateway.quotas.meters import Account, Taking, rate_headers

if TYPE_CHECKING:
    from common.limits import Limits
    from common.types import Subject
    from gateway.quotas.meters import Meters


class LimitsSource(Protocol):
    """Where limits are written down; they may change at any time."""

    @property
    def value(self) -> Limits:
        """The limits in force."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one HTTP request has taken; `settle` must be called once."""

    taking: Taking

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell the client what is left."""
        return rate_headers(self.taking.readings)

    def settle(self, used_tokens: int) -> None:
        """Close the request, and correct what it announced by what it has used; returns at once."""
        self.taking.settle(used_tokens)


@dataclass(frozen=True, slots=True)
class Charge:
    """What an HTTP request is about to take.

    `may_exceed_concurrent`: it passes however many requests are open, as it ends some of them.
    """

    subject: Subject
    requests: int
    tokens: int
    may_exceed_concurrent: bool = False


class Quotas:
    """Applies limits to requests. A changed limit counts at once, and for what has been used already."""

    def __init__(self, rules: LimitsSource | None, meters: Meters) -> None:
        """Hold everybody to `rules`, None for no limits, as counted by `meters`."""
        self._rules = rules
        self._meters = meters

    def max_context(self, subject: Subject) -> int | None:
        """Return the longest context, prompt and output together, that `subject` may use."""
        accounts = self._accounts(subject)
        limits = [account.quota.max_context for account in accounts if account.quota.max_context is not None]
        return min(limits, default=None)

    async def take(self, charge: Charge) -> Lease:
        """Take what `charge` says, from the tenant and from the user, or nothing at all.

        Raises:
            LimitedError: it is more than is left.
            UnavailableError: nobody can say now how much is left.
        """
        accounts = self._accounts(charge.subject)
        if charge.may_exceed_concurrent:
            accounts = list(map(_without_concurrent, accounts))
        accounts = [account for account in accounts if account.is_limited]
        taking = await self._meters.take(accounts, charge.requests, charge.tokens)
        if taking.obstacle is not None:
            headers = rate_headers(taking.readings)
            raise LimitedError(taking.obstacle.message, math.ceil(taking.obstacle.wait_s * 1000), headers)
        return Lease(taking)

    def _accounts(self, subject: Subject) -> list[Account]:
        if self._rules is None:
            return []
        limits, tenant = self._rules.value, subject.tenant
        return [Account(tenant, None, limits.of(tenant)), Account(tenant, subject.name, limits.of_subject(subject))]


def _without_concurrent(account: Account) -> Account:
    return replace(account, quota=account.quota.model_copy(update={"concurrent": None}))


class LimitedError(QueueFullError):
    """A limit is reached; `headers` tell the client how far."""

    def __init__(self, message: str, retry_after_ms: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Keep the message, when to try again, and the headers."""
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.headers = headers
