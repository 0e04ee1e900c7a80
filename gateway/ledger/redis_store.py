"""The ledger of several gateways, in Redis or Valkey."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING

import orjson

from common.lua_scripts import LuaScript
from common.types import Subject
from gateway.ledger.entries import (
    DAY_S,
    HOUR_S,
    REQUEST_LIFETIME_S,
    UNENDED_S,
    HourOfUse,
    Tokens,
    UsageRecord,
    UsageRecords,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from gateway.ledger.entries import LedgerEntry, UsageQuery
    from gateway.state.server import StateServer

# Entries in one call of the script, which blocks the server for some microseconds each.
BATCH = 200
AMOUNTS = len(Tokens._fields)
# Of one entry.
KEYS = 4
# Records that are moved and returned at once.
MOST_RECORDS = 500


class RedisLedger:
    """Implements `gateway.ledger.entries.LedgerStore`: sums of each hour and day, and entries of recent requests."""

    def __init__(self, state: StateServer, lifetime_s: int, log: str | None = None) -> None:
        """Store at `state`; the use of an hour is kept for `lifetime_s`.

        `log` is the name of this gateway's usage log, for which records are kept until it has written them.
        """
        self._state = state
        self._lifetime_s = lifetime_s
        self._log = log
        self._prefix = f"{state.prefix}:ledger"
        self._script = LuaScript(state.redis, "gateway.ledger", "entries.lua")
        self._take = LuaScript(state.redis, "gateway.ledger", "records.lua")

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries, `BATCH` at a time; return the tenant and the increase of each."""
        increases: list[tuple[str, Tokens]] = []
        for first in range(0, len(entries), BATCH):
            batch = entries[first : first + BATCH]
            keys = [key for entry in batch for key in self._keys(entry)] + [self._log_key("due")]
            values: list[str | bytes | int] = [
                REQUEST_LIFETIME_S,
                self._lifetime_s,
                AMOUNTS,
                int(self._log is not None),
            ]
            for entry in batch:
                tenant, name = entry.subject.tenant, entry.subject.name
                values += [
                    orjson.dumps([tenant, name, *entry.work]),
                    orjson.dumps([tenant]),
                    orjson.dumps([tenant, name]),
                    orjson.dumps([entry.request_id, tenant, name, *entry.work]),
                    entry.at,
                    entry.at + UNENDED_S,
                    int(entry.has_ended),
                    orjson.dumps(list(entry.tokens)),
                ]

            async def add(
                _: Redis, keys: Sequence[str] = keys, values: Sequence[str | bytes | int] = values
            ) -> list[Tokens]:
                amounts = orjson.loads(await self._script(keys, values))
                # The last key is of all entries.
                if AMOUNTS * (len(keys) - 1) != KEYS * len(amounts):
                    raise ValueError(f"{len(amounts)} amounts for {len(keys)} keys")
                return [Tokens(*map(int, amounts[at : at + AMOUNTS])) for at in range(0, len(amounts), AMOUNTS)]

            increases += zip((entry.subject.tenant for entry in batch), await self._state.call(add), strict=True)
        return increases

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and work."""
        found = []
        for day in range(query.start, query.end, DAY_S):
            starts = range(day, min(day + DAY_S, query.end), HOUR_S)

            async def read(redis: Redis, starts: range = starts) -> list[HourOfUse]:
                async with redis.pipeline(transaction=False) as pipeline:
                    for hour in starts:
                        pipeline.hgetall(self._hour_key(hour))
                        pipeline.hgetall(self._old_hour_key(hour))
                    answers = await pipeline.execute()
                hours = [hour for hour in starts for _ in range(2)]
                return [use for hour, sums in zip(hours, answers, strict=True) for use in _uses(hour, sums, query)]

            found += await self._state.call(read)
        return found

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day; 31 days at most."""
        field = orjson.dumps([tenant] if subject is None else [tenant, subject])

        async def read(redis: Redis) -> int:
            async with redis.pipeline(transaction=False) as pipeline:
                for day in range(since, since + 31 * DAY_S, DAY_S):
                    pipeline.hget(self._day_key(day), field)
                return sum(int(tokens) for tokens in await pipeline.execute() if tokens is not None)

        return await self._state.call(read)

    async def take_records(self, now: int) -> UsageRecords:
        """Return the log's oldest records, after moving what is due to them."""
        keys = [self._log_key("due"), self._log_key("records"), self._log_key("last"), f"{self._prefix}:name"]
        values: list[str | int] = [now, MOST_RECORDS, secrets.token_hex(8), AMOUNTS]

        async def take(_: Redis) -> UsageRecords:
            ledger, *found = await self._take(keys, values)
            width = 3 + AMOUNTS
            records = [_record(*found[first : first + width]) for first in range(0, len(found), width)]
            return UsageRecords(ledger.decode(), records)

        return await self._state.call(take)

    async def forget_records(self, last: int) -> None:
        """Drop the records up to the number `last`."""
        taken = await self.take_records(0)
        done = sum(record.number <= last for record in taken.records)
        if done:
            await self._state.call(lambda redis: redis.lpop(self._log_key("records"), done))

    async def close(self) -> None:
        """Do nothing: the connection belongs to the gateway's state."""

    def _keys(self, entry: LedgerEntry) -> tuple[str, str, str, str]:
        digest = hashlib.sha256(orjson.dumps([entry.subject.tenant, entry.request_id])).hexdigest()[:40]
        unreported = self._log_key(f"unreported:{digest}")
        return f"{self._prefix}:request:{digest}", self._hour_key(entry.at), self._day_key(entry.at), unreported

    def _log_key(self, name: str) -> str:
        return f"{self._prefix}:log:{self._log}:{name}"

    def _hour_key(self, at: int) -> str:
        return f"{self._prefix}:use:{at - at % HOUR_S}"

    def _old_hour_key(self, at: int) -> str:
        """The sums that gateways before version 0.2 write, by model only."""
        return f"{self._prefix}:hour:{at - at % HOUR_S}"

    def _day_key(self, at: int) -> str:
        return f"{self._prefix}:day:{at - at % DAY_S}"


def _uses(hour: int, fields: dict[bytes, bytes], query: UsageQuery) -> list[HourOfUse]:
    amounts: defaultdict[bytes, list[int]] = defaultdict(lambda: [0] * AMOUNTS)
    for field, value in fields.items():
        whose, _, amount = field.rpartition(b"\n")
        amounts[whose][int(amount) - 1] = int(value)
    uses = []
    for whose in sorted(amounts):
        tenant, name, *work = orjson.loads(whose)
        if query.tenant in (None, tenant) and (query.subjects is None or name in query.subjects):
            uses.append(HourOfUse(hour, Subject(tenant, name), Work(*work), Tokens(*amounts[whose])))
    return uses


def _record(number: bytes, what: bytes, at: bytes, *amounts: bytes) -> UsageRecord:
    request_id, tenant, name, *work = orjson.loads(what)
    return UsageRecord(int(number), request_id, Subject(tenant, name), Work(*work), int(at), Tokens(*map(int, amounts)))
