"""Writes the use of tokens of open and finished requests to a store, and answers questions about it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.logs import get_logger
from gateway.ledger.entries import NOTHING, LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from common.types import RequestId, Subject
    from gateway.ledger.entries import HourOfUse, LedgerStore, Tokens, UsageQuery, Work
    from gateway.metrics import GatewayMetrics

# How often open requests are written: a gateway that is killed loses at most this much of unfinished answers.
CHECKPOINT_S = 1.0
# Entries that wait while the store is unavailable; beyond this, the oldest are dropped, which is logged.
MAX_PENDING = 100_000
# Seconds for which a finished answer waits for its entry to be written.
PATIENCE_S = 5.0


class Ledger:
    """The ledger of one gateway. A request is counted once, by its id, whichever gateways have generated it."""

    def __init__(
        self,
        store: LedgerStore,
        metrics: GatewayMetrics,
        *,
        is_durable: bool = True,
        is_lenient: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write to `store`; `clock` is Unix time in seconds. Answers wait for a store that `is_durable`.

        `is_lenient`: budgets do not apply while the store is unavailable.
        """
        self._is_lenient = is_lenient
        self._is_durable = is_durable
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._pending: dict[tuple[str, RequestId], LedgerEntry] = {}
        self._turn = asyncio.Lock()
        # Whether the last attempt to write has failed.
        self._is_late = False
        self._log = get_logger("ledger")

    def note(
        self, request_id: RequestId, subject: Subject, work: Work, tokens: Tokens, *, has_ended: bool = False
    ) -> None:
        """Replace what is known of a request; it is written later. `has_ended`: no more is expected."""
        key = subject.tenant, request_id
        waiting = self._pending.get(key)
        has_ended |= waiting is not None and waiting.has_ended
        self._pending[key] = LedgerEntry(request_id, subject, work, int(self._clock()), tokens, has_ended)
        if len(self._pending) > MAX_PENDING:
            dropped = self._pending.pop(next(iter(self._pending)))
            self._log.error("ledger.dropped", request_id=dropped.request_id, **dropped.tokens._asdict())

    async def commit(self) -> None:
        """Write everything that was noted before the call.

        Raises:
            UnavailableError: it could not be written; it is written with the next call.
        """
        async with self._turn:
            if not self._pending:
                return
            writing, self._pending = self._pending, {}
            try:
                increases = await self._store.write(list(writing.values()))
            except BaseException:
                # Also after a cancellation; an entry that has been written is not counted again.
                self._pending = {**writing, **self._pending}
                raise
        totals: dict[str, Tokens] = {}
        for tenant, tokens in increases:
            totals[tenant] = totals.get(tenant, NOTHING).plus(tokens)
        for tenant, tokens in totals.items():
            self._metrics.charge(tenant, tokens)

    async def settle(self) -> None:
        """Write what was noted, before an answer's end is sent; an unavailable store does not stop the answer."""
        if self._is_durable:
            await self._try_commit()

    async def run(self, note_open: Callable[[], Awaitable[None]]) -> None:
        """Write periodically what has been noted, after `note_open` has noted the open requests, until cancelled."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            await note_open()
            await self._try_commit()

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and work, including all that was noted.

        Raises:
            UnavailableError: the store is unavailable.
        """
        await self.commit()
        return await self._store.hours(query)

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens that a subject, or a whole tenant, has used since the start of a day (Unix time, UTC).

        While the store is unavailable, a lenient ledger returns 0.

        Raises:
            UnavailableError: the store is unavailable, and the ledger is not lenient.
        """
        try:
            await self.commit()
            return await self._store.spent(tenant, subject, since)
        except UnavailableError as error:
            if not self._is_lenient:
                raise
            self._log.warning("ledger.budget_unchecked", reason=error.message)
            return 0

    def now(self) -> datetime:
        """Return the time by the ledger's clock, in UTC."""
        return datetime.fromtimestamp(self._clock(), UTC)

    async def close(self) -> None:
        """Write what is left and close the store."""
        await self._try_commit()
        await self._store.close()

    async def _try_commit(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.commit()
        except (UnavailableError, TimeoutError) as error:
            # Once, and not for every answer that ends in the meantime.
            if not self._is_late:
                self._is_late = True
                self._log.error("ledger.late", reason=str(error) or "timeout", waiting=len(self._pending))
        else:
            if self._is_late:
                self._is_late = False
                self._log.info("ledger.written")


def today(now: datetime) -> tuple[datetime, datetime]:
    """Return the start and the end of the day, in UTC."""
    start = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return start, start + timedelta(days=1)


def this_month(now: datetime) -> tuple[datetime, datetime]:
    """Return the start and the end of the calendar month, in UTC."""
    start = today(now)[0].replace(day=1)
    return start, (start + timedelta(days=32)).replace(day=1)
