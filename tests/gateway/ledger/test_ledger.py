"""The ledger and its stores: each request is counted once, whatever is written again."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest
from structlog.testing import capture_logs

from common.errors import ConfigurationError, UnavailableError
from common.types import RequestId, Subject
from gateway.ledger.entries import (
    DAY_S,
    HOUR_S,
    NOTHING,
    UNENDED_S,
    LedgerEntry,
    LedgerStore,
    Tokens,
    UsageQuery,
    Work,
)
from gateway.ledger.ledger import Ledger, this_month
from gateway.ledger.redis_store import RedisLedger
from gateway.ledger.sqlite_store import SqliteLedger
from tests.gateway.state.servers import new_metrics, new_prefix, state_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.fakes.redis_process import RedisProcess

ANN, BOB = Subject("acme", "ann"), Subject("acme", "bob")
NOON = 1_767_268_800  # 2026-01-01 12:00 UTC


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LedgerStore]:
    async with AsyncExitStack() as stack:
        if request.param == "sqlite":
            sqlite = SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S)
            stack.push_async_callback(sqlite.close)
            yield sqlite
        else:
            process: RedisProcess = request.getfixturevalue("redis_process")
            server = await stack.enter_async_context(state_server(process.url, new_prefix(), probes=False))
            yield RedisLedger(server, 400 * DAY_S)


def entry(name: str, output: int, *, subject: Subject = ANN, at: int = NOON, cached: int = 0) -> LedgerEntry:
    return LedgerEntry(RequestId(name), subject, Work("tiny"), at, Tokens(1, 10, cached, output))


async def total(store: LedgerStore, tenant: str | None = None) -> Tokens:
    hours = await store.hours(UsageQuery(NOON - DAY_S, NOON + DAY_S, tenant))
    return Tokens(*(sum(amounts) for amounts in zip(*(hour.tokens for hour in hours), strict=True)))


async def test_an_entry_replaces_an_earlier_one_with_its_id(store: LedgerStore) -> None:
    assert await store.write([entry("a", 3)]) == [("acme", Tokens(1, 10, 0, 3))]
    assert await store.write([entry("a", 3)]) == [("acme", Tokens(0, 0, 0, 0))]
    assert await store.write([entry("a", 5), entry("b", 1)]) == [
        ("acme", Tokens(0, 0, 0, 2)),
        ("acme", Tokens(1, 10, 0, 1)),
    ]
    # From a gateway that was slower.
    assert await store.write([entry("a", 4)]) == [("acme", Tokens(0, 0, 0, 0))]
    assert await total(store) == Tokens(2, 20, 0, 6)


async def test_a_request_stays_in_the_hour_of_its_first_entry(store: LedgerStore) -> None:
    await store.write([entry("a", 1)])
    await store.write([entry("a", 2, at=NOON + 13 * HOUR_S)])
    assert [(use.hour, use.tokens.output_tokens) for use in await store.hours(UsageQuery(NOON, NOON + DAY_S))] == [
        (NOON, 2)
    ]
    assert await store.spent("acme", None, NOON + DAY_S // 2) == 0
    assert await store.spent("acme", None, NOON - DAY_S // 2) == 12


async def test_the_same_id_of_another_tenant_is_another_request(store: LedgerStore) -> None:
    await store.write([entry("a", 1), entry("a", 2, subject=Subject("other", "ann"))])
    assert (await total(store, "acme")).output_tokens == 1
    assert (await total(store, "other")).output_tokens == 2
    assert (await total(store)).requests == 2


async def test_what_is_spent_counts_the_tenant_or_one_subject(store: LedgerStore) -> None:
    await store.write([entry("a", 1), entry("b", 2, subject=BOB)])
    day = NOON - DAY_S // 2
    assert await store.spent("acme", None, day) == 23
    assert await store.spent("acme", "ann", day) == 11
    assert await store.spent("acme", "nobody", day) == 0
    [use] = await store.hours(UsageQuery(NOON, NOON + HOUR_S, "acme", ("bob",)))
    assert (use.subject, use.work, use.tokens) == (BOB, Work("tiny"), Tokens(1, 10, 0, 2))


async def test_gateways_that_write_the_same_requests_at_once_count_them_once(store: LedgerStore) -> None:
    metrics = new_metrics()
    ledgers = [Ledger(store, metrics, clock=lambda: NOON) for _ in range(3)]
    for output in range(1, 8):
        for ledger in ledgers:
            for number in range(300):
                ledger.note(RequestId(f"r{number}"), ANN, Work("tiny"), Tokens(1, 10, 4, output))
        await asyncio.gather(*(ledger.commit() for ledger in ledgers))
    assert await total(store) == Tokens(300, 3000, 1200, 2100)
    shown = metrics.exposition()[0].decode()
    for kind, amount in {"prompt": 3000, "cached": 1200, "output": 2100}.items():
        assert f'pando_gateway_tenant_tokens_total{{kind="{kind}",tenant="acme"}} {amount}.0' in shown


async def test_use_is_distinguished_by_its_work_and_its_parts(store: LedgerStore) -> None:
    tokens = Tokens(1, 10, 8, 5, 3, 2)._replace(device_public_tokens=5, storage_private_tokens=3)
    works = [
        Work("tiny", "", "chat"), Work("tiny", "poems", "chat"), Work("tiny", "", "embeddings"),
        Work("tiny", "", "chat", is_batch=True), Work("other", "", "chat"),
    ]  # fmt: skip
    for number, work in enumerate(works):
        entries = [LedgerEntry(RequestId(f"{number}-{twin}"), ANN, work, NOON, tokens) for twin in range(2)]
        assert await store.write(entries) == [("acme", tokens)] * 2
    found = {use.work: use.tokens for use in await store.hours(UsageQuery(NOON, NOON + HOUR_S))}
    assert found == dict.fromkeys(works, Tokens(*(2 * amount for amount in tokens)))


def with_log(path: Path | None) -> SqliteLedger:
    return SqliteLedger(path, 400 * DAY_S, has_log=True)


@pytest.fixture(params=["sqlite", "redis"])
async def logged(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LedgerStore]:
    async with AsyncExitStack() as stack:
        if request.param == "sqlite":
            sqlite = with_log(tmp_path / "logged.db")
            stack.push_async_callback(sqlite.close)
            yield sqlite
        else:
            process: RedisProcess = request.getfixturevalue("redis_process")
            server = await stack.enter_async_context(state_server(process.url, new_prefix(), probes=False))
            yield RedisLedger(server, 400 * DAY_S, "log")


def ended(found: LedgerEntry) -> LedgerEntry:
    return replace(found, has_ended=True)


async def test_a_record_has_all_of_a_request_once_it_has_ended(logged: LedgerStore) -> None:
    await logged.write([entry("a", 1), entry("b", 1)])
    assert not (await logged.take_records(NOON)).records
    await logged.write([entry("a", 5), ended(entry("c", 2))])
    await logged.write([ended(entry("a", 5))])
    taken = await logged.take_records(NOON)
    assert {(each.request_id, each.tokens) for each in taken.records} == {
        ("a", Tokens(1, 10, 0, 5)),
        ("c", Tokens(1, 10, 0, 2)),
    }
    assert [each.number for each in taken.records] == [1, 2]
    assert await logged.take_records(NOON) == taken, "they are kept until they are in the log"
    await logged.forget_records(1)
    assert (await logged.take_records(NOON)).records == taken.records[1:]
    await logged.forget_records(2)
    assert not (await logged.take_records(NOON)).records


async def test_a_request_without_an_end_is_recorded_after_a_while_and_its_rest_again(logged: LedgerStore) -> None:
    await logged.write([entry("a", 1)])
    [first] = (await logged.take_records(NOON + UNENDED_S)).records
    await logged.forget_records(first.number)
    await logged.write([ended(entry("a", 4, at=NOON + 70))])
    [rest] = (await logged.take_records(NOON + 70)).records
    assert (first.tokens, rest.tokens) == (Tokens(1, 10, 0, 1), Tokens(0, 0, 0, 3))
    assert (rest.number, rest.at) == (2, NOON + 70)


async def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    database = sqlite3.connect(path)
    names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    amounts = ", ".join(f"{name} INTEGER NOT NULL" for name in names)
    database.executescript(f"""
        CREATE TABLE requests (tenant TEXT NOT NULL, id TEXT NOT NULL, hour INTEGER NOT NULL, changed INTEGER NOT NULL,
            {amounts}, PRIMARY KEY (tenant, id)) STRICT, WITHOUT ROWID;
        CREATE INDEX requests_by_change ON requests (changed);
        CREATE TABLE hours (tenant TEXT NOT NULL, hour INTEGER NOT NULL, subject TEXT NOT NULL, model TEXT NOT NULL,
            {amounts}, PRIMARY KEY (tenant, hour, subject, model)) STRICT, WITHOUT ROWID;
        CREATE INDEX hours_by_time ON hours (hour);
        INSERT INTO requests VALUES ('acme', 'a', {NOON}, {NOON}, 1, 10, 4, 3);
        INSERT INTO hours VALUES ('acme', {NOON}, 'ann', 'tiny', 1, 10, 4, 3);
    """)
    database.close()
    for _ in range(2):
        store = SqliteLedger(path, 400 * DAY_S)
        [use] = await store.hours(UsageQuery(NOON, NOON + HOUR_S))
        assert (use.subject, use.work, use.tokens) == (ANN, Work("tiny"), Tokens(1, 10, 4, 3))
        assert await store.write([entry("a", 3, cached=4)]) == [("acme", NOTHING)]
        await store.close()


async def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigurationError, match="version 99"):
        SqliteLedger(path, 400 * DAY_S)


async def test_sums_of_gateways_of_the_first_version_are_read(redis_process: RedisProcess) -> None:
    async with state_server(redis_process.url, new_prefix(), probes=False) as server:
        sums = {orjson.dumps(["acme", "ann", "tiny"]) + f"\n{amount}".encode(): 10 + amount for amount in range(1, 5)}
        key = f"{server.prefix}:ledger:hour:{NOON}"
        for field, amount in sums.items():
            await server.redis.hset(key, field.decode(), str(amount))
        store = RedisLedger(server, 400 * DAY_S)
        await store.write([entry("a", 1)])
        uses = await store.hours(UsageQuery(NOON, NOON + HOUR_S))
        assert [use.tokens for use in uses] == [Tokens(1, 10, 0, 1), Tokens(11, 12, 13, 14)]


async def test_a_file_keeps_what_was_written(tmp_path: Path) -> None:
    first = SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S)
    await first.write([entry("a", 3)])
    await first.close()
    second = SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S)
    assert await second.write([entry("a", 4)]) == [("acme", Tokens(0, 0, 0, 1))]
    await second.close()


class Failing:
    """A store that fails until told otherwise."""

    def __init__(self, store: LedgerStore) -> None:
        self.fails = True
        self._store = store
        self.hours, self.close = store.hours, store.close
        self.take_records, self.forget_records = store.take_records, store.forget_records

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        increases = await self._store.write(entries)
        if self.fails:
            raise UnavailableError("written, but the reply was lost")
        return increases

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        return await self._store.spent(tenant, subject, since)


async def test_entries_wait_for_a_store_that_fails_and_are_counted_once(tmp_path: Path) -> None:
    failing = Failing(SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S))
    ledger = Ledger(failing, new_metrics(), clock=lambda: NOON)
    ledger.note(RequestId("a"), ANN, Work("tiny"), Tokens(1, 10, 0, 3))
    await ledger.settle()
    with pytest.raises(UnavailableError):
        await ledger.spent("acme", None, NOON)
    assert await Ledger(failing, new_metrics(), is_lenient=True).spent("acme", None, NOON - DAY_S // 2) == 13
    ledger.note(RequestId("a"), ANN, Work("tiny"), Tokens(1, 10, 0, 7))
    failing.fails = False
    await ledger.settle()
    assert await total(failing) == Tokens(1, 10, 0, 7)
    await ledger.close()


async def test_a_store_that_fails_is_logged_once_until_it_writes_again(tmp_path: Path) -> None:
    failing = Failing(SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S))
    with capture_logs() as events:
        ledger = Ledger(failing, new_metrics(), clock=lambda: NOON)
        for failing.fails in (True, True, False, False, True):
            for number in range(3):
                ledger.note(RequestId(f"r{number}"), ANN, Work("tiny"), Tokens(1, 10, 0, 3))
                await ledger.settle()
        await ledger.close()
    assert [event["event"] for event in events] == ["ledger.late", "ledger.written", "ledger.late"]


async def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    store = SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S)
    ledger = Ledger(store, new_metrics(), clock=lambda: NOON)
    store._database.execute("PRAGMA max_page_count = 1")
    for number in range(5000):
        ledger.note(RequestId(f"r{number}"), ANN, Work("tiny"), Tokens(1, 10, 0, 3))
    with pytest.raises(UnavailableError, match="full"):
        await ledger.commit()
    store._database.execute("PRAGMA max_page_count = 100000")
    await ledger.commit()
    assert await total(store) == Tokens(5000, 50_000, 0, 15_000)
    await ledger.close()


def test_the_month_ends_at_the_next_one() -> None:
    ledger = Ledger(SqliteLedger(None, DAY_S), new_metrics(), clock=lambda: NOON + 364 * DAY_S)
    start, end = this_month(ledger.now())
    assert (start.isoformat(), end.isoformat()) == ("2026-12-01T00:00:00+00:00", "2027-01-01T00:00:00+00:00")
