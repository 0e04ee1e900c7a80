"""The ledger of a single gateway, in SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, UnavailableError
from common.types import Subject
from gateway.ledger.entries import (
    DAY_S,
    HOUR_S,
    NOTHING,
    REQUEST_LIFETIME_S,
    UNENDED_S,
    HourOfUse,
    Tokens,
    UsageRecord,
    UsageRecords,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.ledger.entries import LedgerEntry, UsageQuery

T = TypeVar("T")

AMOUNTS = ", ".join(Tokens._fields)
AMOUNT_COLUMNS = ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in Tokens._fields)
ADDED = ", ".join(f"{name} = {name} + excluded.{name}" for name in Tokens._fields)
PLACES = ", ".join("?" * len(Tokens._fields))
WORK = "model, adapter, operation, batch"
WORK_COLUMNS = "model TEXT NOT NULL, adapter TEXT NOT NULL, operation TEXT NOT NULL, batch INTEGER NOT NULL"
SCHEMA_VERSION = 1
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS requests (
    tenant TEXT NOT NULL, id TEXT NOT NULL, hour INTEGER NOT NULL, changed INTEGER NOT NULL, {AMOUNT_COLUMNS},
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_change ON requests (changed);
CREATE TABLE IF NOT EXISTS hours (
    tenant TEXT NOT NULL, hour INTEGER NOT NULL, subject TEXT NOT NULL, {WORK_COLUMNS}, {AMOUNT_COLUMNS},
    PRIMARY KEY (tenant, hour, subject, {WORK})
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS hours_by_time ON hours (hour);
-- Increases that no record has yet.
CREATE TABLE IF NOT EXISTS unreported (
    tenant TEXT NOT NULL, id TEXT NOT NULL, subject TEXT NOT NULL, {WORK_COLUMNS}, at INTEGER NOT NULL,
    ended INTEGER NOT NULL, {AMOUNT_COLUMNS},
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL, tenant TEXT NOT NULL, subject TEXT NOT NULL, {WORK_COLUMNS}, at INTEGER NOT NULL, {AMOUNT_COLUMNS}
) STRICT;
CREATE TABLE IF NOT EXISTS ledger (name TEXT NOT NULL) STRICT;
INSERT INTO ledger SELECT lower(hex(randomblob(8))) WHERE NOT EXISTS (SELECT 1 FROM ledger);
"""
# Version 0 had only these amounts, and sums by model.
OLD_AMOUNTS = "requests, prompt_tokens, cached_tokens, output_tokens"
# Records that are returned at once.
MOST_RECORDS = 1000


class SqliteLedger:
    """Implements `gateway.ledger.entries.LedgerStore`; one thread does all work in order."""

    def __init__(self, path: Path | None, lifetime_s: int, *, has_log: bool = False) -> None:
        """Open the database at `path`; None keeps it in memory. The use of an hour is kept for `lifetime_s`.

        With `has_log`, records for a usage log are kept until it has written them.

        Raises:
            ConfigurationError: the database cannot be opened.
        """
        self._lifetime_s = lifetime_s
        self._has_log = has_log
        self._swept_at = 0
        self._thread = ThreadPoolExecutor(1, "ledger")
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            # A commit survives the end of this process; only a power cut can undo the last ones.
            self._database.execute("PRAGMA journal_mode = WAL")
            # With a log, none may be undone, because their records have numbers that the log's lines have.
            self._database.execute(f"PRAGMA synchronous = {'FULL' if has_log else 'NORMAL'}")
            self._open_schema()
        except sqlite3.Error as error:
            raise ConfigurationError(f"ledger file {path}: {error}") from error

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries in one transaction; return the tenant and the increase of each."""
        return await self._run(lambda: self._write(entries))

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and work."""
        return await self._run(lambda: self._hours(query))

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day."""
        return await self._run(lambda: self._spent(tenant, subject, since))

    async def take_records(self, now: int) -> UsageRecords:
        """Return the oldest records, after moving what is due to them."""
        return await self._run(lambda: self._take_records(now))

    async def forget_records(self, last: int) -> None:
        """Drop the records up to the number `last`."""
        await self._run(lambda: self._database.execute("DELETE FROM records WHERE number <= ?", (last,)))

    async def close(self) -> None:
        """Close the database after the work under way."""
        self._thread.shutdown()
        self._database.close()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise UnavailableError(f"The ledger is not available now ({error}).", retry_after_ms=1000) from error

    def _write(self, entries: Sequence[LedgerEntry]) -> list[tuple[str, Tokens]]:
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits or rolls back
            increases = [(entry.subject.tenant, self._add(entry)) for entry in entries]
            for entry in entries:
                if entry.has_ended and self._has_log:
                    self._end(entry)
            self._sweep(max(entry.at for entry in entries))
        return increases

    def _add(self, entry: LedgerEntry) -> Tokens:
        tenant = entry.subject.tenant
        row = self._database.execute(
            f"SELECT hour, {AMOUNTS} FROM requests WHERE tenant = ? AND id = ?",
            (tenant, entry.request_id),
        ).fetchone()
        hour, known = (entry.at - entry.at % HOUR_S, NOTHING) if row is None else (row[0], Tokens(*row[1:]))
        if entry.tokens.output_tokens < known.output_tokens or entry.tokens == known:
            return NOTHING
        increase = entry.tokens.minus(known)
        self._database.execute(
            f"REPLACE INTO requests (tenant, id, hour, changed, {AMOUNTS}) VALUES (?, ?, ?, ?, {PLACES})",
            (tenant, entry.request_id, hour, entry.at, *entry.tokens),
        )
        self._database.execute(
            f"INSERT INTO hours (tenant, hour, subject, {WORK}, {AMOUNTS}) VALUES (?, ?, ?, ?, ?, ?, ?, {PLACES}) "
            f"ON CONFLICT DO UPDATE SET {ADDED}",
            (tenant, hour, entry.subject.name, *entry.work, *increase),
        )
        if self._has_log:
            self._database.execute(
                f"INSERT INTO unreported (tenant, id, subject, {WORK}, at, ended, {AMOUNTS}) "
                f"VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, {PLACES}) ON CONFLICT DO UPDATE SET {ADDED}",
                (tenant, entry.request_id, entry.subject.name, *entry.work, entry.at, *increase),
            )
        return increase

    def _end(self, entry: LedgerEntry) -> None:
        self._database.execute(
            "UPDATE unreported SET ended = 1 WHERE tenant = ? AND id = ?", (entry.subject.tenant, entry.request_id)
        )

    def _take_records(self, now: int) -> UsageRecords:
        columns = f"id, tenant, subject, {WORK}, at, {AMOUNTS}"
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:
            is_due = "ended OR at <= ?"
            self._database.execute(
                f"INSERT INTO records ({columns}) SELECT {columns} FROM unreported WHERE {is_due} ORDER BY at, id",
                (now - UNENDED_S,),
            )
            self._database.execute(f"DELETE FROM unreported WHERE {is_due}", (now - UNENDED_S,))
            [name] = self._database.execute("SELECT name FROM ledger").fetchone()
            rows = self._database.execute(
                f"SELECT number, {columns} FROM records ORDER BY number LIMIT {MOST_RECORDS}"
            ).fetchall()
        return UsageRecords(
            name,
            [
                UsageRecord(number, request_id, Subject(tenant, subject), _work(*work), at, Tokens(*amounts))
                for number, request_id, tenant, subject, work, at, amounts in (
                    (*row[:4], row[4:8], row[8], row[9:]) for row in rows
                )
            ],
        )

    def _open_schema(self) -> None:
        """Create the tables, or bring those of an older version up to date, in one transaction."""
        [version] = self._database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise ConfigurationError(f"the ledger file has version {version}; this gateway reads {SCHEMA_VERSION}")
        is_old = version == 0 and self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'hours'").fetchone()
        moves = ["ALTER TABLE requests RENAME TO old_requests", "ALTER TABLE hours RENAME TO old_hours"]
        copies = [
            f"INSERT INTO requests (tenant, id, hour, changed, {OLD_AMOUNTS}) "
            f"SELECT tenant, id, hour, changed, {OLD_AMOUNTS} FROM old_requests",
            f"INSERT INTO hours (tenant, hour, subject, {WORK}, {OLD_AMOUNTS}) "
            f"SELECT tenant, hour, subject, model, '', '', 0, {OLD_AMOUNTS} FROM old_hours",
            "DROP TABLE old_requests",
            "DROP TABLE old_hours",
        ]
        drops = ["DROP INDEX IF EXISTS requests_by_change", "DROP INDEX IF EXISTS hours_by_time"]
        steps = [*moves, *drops, SCHEMA, *copies] if is_old else [SCHEMA]
        self._database.executescript(
            "BEGIN IMMEDIATE;" + ";".join(steps) + f";PRAGMA user_version = {SCHEMA_VERSION};COMMIT"
        )

    def _sweep(self, now: int) -> None:
        if now < self._swept_at + HOUR_S:
            return
        self._swept_at = now
        self._database.execute("DELETE FROM requests WHERE changed < ?", (now - REQUEST_LIFETIME_S,))
        self._database.execute("DELETE FROM hours WHERE hour < ?", (now - self._lifetime_s - DAY_S,))

    def _hours(self, query: UsageQuery) -> list[HourOfUse]:
        conditions, values = ["hour >= ?", "hour < ?"], [query.start, query.end]
        names: list[str] = []
        if query.tenant is not None:
            conditions.append("tenant = ?")
            names.append(query.tenant)
        if query.subjects is not None:
            conditions.append(f"subject IN ({', '.join('?' * len(query.subjects))})")
            names += query.subjects
        rows = self._database.execute(
            f"SELECT hour, tenant, subject, {WORK}, {AMOUNTS} FROM hours WHERE "
            + " AND ".join(conditions)
            + f" ORDER BY hour, tenant, subject, {WORK}",
            [*values, *names],
        )
        return [
            HourOfUse(hour, Subject(tenant, subject), _work(*work), Tokens(*amounts))
            for hour, tenant, subject, work, amounts in ((*row[:3], row[3:7], row[7:]) for row in rows)
        ]

    def _spent(self, tenant: str, subject: str | None, since: int) -> int:
        whose, names = (
            ("tenant = ?", [tenant]) if subject is None else ("tenant = ? AND subject = ?", [tenant, subject])
        )
        [spent] = self._database.execute(
            f"SELECT SUM(prompt_tokens + output_tokens) FROM hours WHERE {whose} AND hour >= ?",
            (*names, since),
        ).fetchone()
        return spent or 0


def _work(model: str, adapter: str, operation: str, batch: int) -> Work:
    return Work(model, adapter, operation, bool(batch))
