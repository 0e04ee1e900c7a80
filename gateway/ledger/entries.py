"""The ledger's entries, what can be asked of it, and the interface of its stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import RequestId, Subject

HOUR_S = 3600
DAY_S = 24 * HOUR_S
# Entries of single requests are kept for this long after their last change, so that a request that is continued at
# another gateway is not counted twice; afterwards only the sums of each hour remain.
REQUEST_LIFETIME_S = 40 * DAY_S


class Tokens(NamedTuple):
    """Amounts that are charged. `cached_tokens` are a part of `prompt_tokens`."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        """Tokens of prompts and output."""
        return self.prompt_tokens + self.output_tokens

    def minus(self, other: Tokens) -> Tokens:
        """Return the differences."""
        return Tokens(*(own - less for own, less in zip(self, other, strict=True)))


NOTHING = Tokens(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The use of one request so far; a later entry with the same id replaces it unless it has less output."""

    request_id: RequestId
    subject: Subject
    model: str
    # Unix time; the hour of a request's first entry counts.
    at: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The accounts and the time to sum over, in Unix seconds: `start` inclusive, `end` exclusive, whole hours.

    `tenant` None stands for all tenants, `subjects` None for all subjects.
    """

    start: int
    end: int
    tenant: str | None = None
    subjects: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HourOfUse:
    """The use of one subject and model in the hour that starts at `hour`."""

    hour: int
    subject: Subject
    model: str
    tokens: Tokens


class LedgerStore(Protocol):
    """Stores entries. Every method may raise UnavailableError."""

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries; return the tenant and the increase of each. An entry that is written again changes nothing."""

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and model."""

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day (Unix time, UTC)."""

    async def close(self) -> None:
        """Release the store."""
