"""The ledger of several gateways, in Redis or Valkey."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from importlib import resources
from typing import TYPE_CHECKING

import orjson

from common.types import Subject
from gateway.ledger.entries import DAY_S, HOUR_S, REQUEST_LIFETIME_S, HourOfUse, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from gateway.ledger.entries import LedgerEntry, UsageQuery
    from gateway.state.server import StateServer

# Entries in one call of the script, which blocks the server for some microseconds each.
BATCH = 200


class RedisLedger:
    """Implements `gateway.ledger.entries.LedgerStore`: sums of each hour and day, and entries of recent requests."""

    def __init__(self, state: StateServer, lifetime_s: int) -> None:
        """Store at `state`; the use of an hour is kept for `lifetime_s`."""
        self._state = state
        self._lifetime_s = lifetime_s
        self._prefix = f"{state.prefix}:ledger"
        script = resources.files("gateway.ledger").joinpath("entries.lua").read_text()
        self._script = state.redis.register_script(script)

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries, `BATCH` at a time; return the tenant and the increase of each."""
        increases: list[tuple[str, Tokens]] = []
        for first in range(0, len(entries), BATCH):
            batch = entries[first : first + BATCH]
            keys = [key for entry in batch for key in self._keys(entry)]
            values: list[str | bytes | int] = [REQUEST_LIFETIME_S, self._lifetime_s]
            for entry in batch:
                tenant, name = entry.subject.tenant, entry.subject.name
                values += [
                    orjson.dumps([tenant, name, entry.model]),
                    orjson.dumps([tenant]),
                    orjson.dumps([tenant, name]),
                ]
                values += entry.tokens
            amounts = await self._state.call(lambda _, keys=keys, values=values: self._script(keys, values))  # type: ignore[misc]  # bound in the loop
            increases += [
                (entry.subject.tenant, Tokens(*amounts[4 * number : 4 * number + 4]))
                for number, entry in enumerate(batch)
            ]
        return increases

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and model."""
        found = []
        for day in range(query.start, query.end, DAY_S):
            starts = range(day, min(day + DAY_S, query.end), HOUR_S)

            async def read(redis: Redis, starts: range = starts) -> list[dict[bytes, bytes]]:
                async with redis.pipeline(transaction=False) as pipeline:
                    for hour in starts:
                        pipeline.hgetall(self._hour_key(hour))
                    return await pipeline.execute()

            for hour, fields in zip(starts, await self._state.call(read), strict=True):
                found += _uses(hour, fields, query)
        return found

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day; 31 days at most."""
        field = orjson.dumps([tenant] if subject is None else [tenant, subject])

        async def read(redis: Redis) -> list[bytes | None]:
            async with redis.pipeline(transaction=False) as pipeline:
                for day in range(since, since + 31 * DAY_S, DAY_S):
                    pipeline.hget(self._day_key(day), field)
                return await pipeline.execute()

        return sum(int(tokens) for tokens in await self._state.call(read) if tokens is not None)

    async def close(self) -> None:
        """Do nothing: the connection belongs to the gateway's state."""

    def _keys(self, entry: LedgerEntry) -> tuple[str, str, str]:
        digest = hashlib.sha256(orjson.dumps([entry.subject.tenant, entry.request_id])).hexdigest()[:40]
        return f"{self._prefix}:request:{digest}", self._hour_key(entry.at), self._day_key(entry.at)

    def _hour_key(self, at: int) -> str:
        return f"{self._prefix}:hour:{at - at % HOUR_S}"

    def _day_key(self, at: int) -> str:
        return f"{self._prefix}:day:{at - at % DAY_S}"


def _uses(hour: int, fields: dict[bytes, bytes], query: UsageQuery) -> list[HourOfUse]:
    amounts: defaultdict[bytes, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for field, value in fields.items():
        whose, _, amount = field.rpartition(b"\n")
        amounts[whose][int(amount) - 1] = int(value)
    uses = []
    for whose in sorted(amounts):
        tenant, name, model = orjson.loads(whose)
        if query.tenant in (None, tenant) and (query.subjects is None or name in query.subjects):
            uses.append(HourOfUse(hour, Subject(tenant, name), model, Tokens(*amounts[whose])))
    return uses
