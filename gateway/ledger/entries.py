"""The ledger's entries, what can be asked of it, and the interface of its stores."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.deltas import CACHE_LEVELS, CACHE_TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import RequestId, Subject

HOUR_S = 3600
DAY_S = 24 * HOUR_S
# Entries of single requests are kept for this long after their last change, so that a request that is continued at
# another gateway is not counted twice; afterwards only the sums of each hour remain.
REQUEST_LIFETIME_S = 40 * DAY_S
# A request without an end is reported in the usage log this long after its first unreported entry.
UNENDED_S = 60


class Tokens(NamedTuple):
    """Amounts that are charged.

    `cached_tokens` are a part of `prompt_tokens`, and the amounts below, one for each tier and level of the cache, are
    parts of `cached_tokens`. `forced_tokens`, which a grammar determined, and `drafted_tokens`, of accepted drafts, are
    parts of `output_tokens`.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    forced_tokens: int = 0
    drafted_tokens: int = 0
    device_public_tokens: int = 0
    device_tenant_tokens: int = 0
    device_private_tokens: int = 0
    host_public_tokens: int = 0
    host_tenant_tokens: int = 0
    host_private_tokens: int = 0
    storage_public_tokens: int = 0
    storage_tenant_tokens: int = 0
    storage_private_tokens: int = 0

    @property
    def total(self) -> int:
        """Tokens of prompts and output."""
        return self.prompt_tokens + self.output_tokens

    def plus(self, other: Tokens) -> Tokens:
        """Return the sums."""
        return Tokens(*map(add, self, other))

    def minus(self, other: Tokens) -> Tokens:
        """Return the differences."""
        return Tokens(*map(sub, self, other))

    def cached_by_tier(self) -> dict[str, dict[str, int]]:
        """Return the cached tokens by tier and level."""
        return {
            tier: {level: getattr(self, cached_amount(tier, level)) for level in CACHE_LEVELS} for tier in CACHE_TIERS
        }


NOTHING = Tokens(0, 0, 0, 0)


def cached_amount(tier: str, level: str) -> str:
    """Return the name of the amount of tokens from a tier and level of the cache."""
    return f"{tier}_{level}_tokens"


CACHE_AMOUNTS = tuple(cached_amount(tier, level) for tier in CACHE_TIERS for level in CACHE_LEVELS)


class Work(NamedTuple):
    """The work that tokens were used for: the model, its adapter (empty: none), and the endpoint's operation."""

    model: str
    adapter: str = ""
    # Such as chat or embeddings; empty: not known.
    operation: str = ""
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The use of one request so far; a later entry with the same id replaces it unless it has less output."""

    request_id: RequestId
    subject: Subject
    work: Work
    # Unix time; the hour of a request's first entry counts.
    at: int
    tokens: Tokens
    # Whether no more tokens are expected; more are counted nevertheless.
    has_ended: bool = False


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
    """The use of one subject for one kind of work in the hour that starts at `hour`."""

    hour: int
    subject: Subject
    work: Work
    tokens: Tokens


class UsageRecord(NamedTuple):
    """An increase of a request's use that the usage log is to report.

    A store numbers the records of a log from 1. A request has one record, or several if it takes longer than a minute
    or is continued after its end.
    """

    number: int
    request_id: str
    subject: Subject
    work: Work
    # Of the first entry of this record, in Unix seconds.
    at: int
    tokens: Tokens


class UsageRecords(NamedTuple):
    """The oldest records that have not been forgotten; numbers are valid within the `ledger` (a random name)."""

    ledger: str
    records: Sequence[UsageRecord]


class LedgerStore(Protocol):
    """Stores entries. Every method may raise UnavailableError."""

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries; return the tenant and the increase of each. An entry that is written again changes nothing."""

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and work."""

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day (Unix time, UTC)."""

    async def take_records(self, now: int) -> UsageRecords:
        """Return records of requests that have ended, or began `UNENDED_S` before `now`; the same until forgotten."""

    async def forget_records(self, last: int) -> None:
        """Drop the records up to the number `last`, which are in the log."""

    async def close(self) -> None:
        """Release the store."""
