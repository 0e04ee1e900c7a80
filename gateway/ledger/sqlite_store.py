"""The ledger of a single gateway, in SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, UnavailableError
from common.types import Subject
from gateway.ledger.entries import DAY_S, HOUR_S, NOTHING, REQUEST_LIFETIME_S, HourOfUse, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.ledger.entries import LedgerEntry, UsageQuery

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    tenant TEXT NOT NULL, id TEXT NOT NULL, hour INTEGER NOT NULL, changed INTEGER NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_change ON requests (changed);
CREATE TABLE IF NOT EXISTS hours (
    tenant TEXT NOT NULL, hour INTEGER NOT NULL, subject TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant, hour, subject, model)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS hours_by_time ON hours (hour);
"""
AMOUNTS = ", ".join(Tokens._fields)


class SqliteLedger:
    """Implements `gateway.ledger.entries.LedgerStore`; one thread does all work in order."""

    def __init__(self, path: Path | None, lifetime_s: int) -> None:
        """Open the database at `path`; None keeps it in memory. The use of an hour is kept for `lifetime_s`.

        Raises:
            ConfigurationError: the database cannot be opened.
        """
        self._lifetime_s = lifetime_s
        self._swept_at = 0
        self._thread = ThreadPoolExecutor(1, "ledger")
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            # A commit survives the end of this process; only a power cut can undo the last ones.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(f"ledger file {path}: {error}") from error

    async def write(self, entries: Sequence[LedgerEntry]) -> Sequence[tuple[str, Tokens]]:
        """Store entries in one transaction; return the tenant and the increase of each."""
        return await self._run(lambda: self._write(entries))

    async def hours(self, query: UsageQuery) -> Sequence[HourOfUse]:
        """Return the use in each hour, by subject and model."""
        return await self._run(lambda: self._hours(query))

    async def spent(self, tenant: str, subject: str | None, since: int) -> int:
        """Return the tokens of a subject, or of a whole tenant, since the start of a day."""
        return await self._run(lambda: self._spent(tenant, subject, since))

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
            "REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (tenant, entry.request_id, hour, entry.at, *entry.tokens),
        )
        self._database.execute(
            "INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            + ", ".join(f"{name} = {name} + excluded.{name}" for name in Tokens._fields),
            (tenant, hour, entry.subject.name, entry.model, *increase),
        )
        return increase

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
            f"SELECT hour, tenant, subject, model, {AMOUNTS} FROM hours WHERE "
            + " AND ".join(conditions)
            + " ORDER BY hour, tenant, subject, model",
            [*values, *names],
        )
        return [
            HourOfUse(hour, Subject(tenant, subject), model, Tokens(*amounts))
            for hour, tenant, subject, model, *amounts in rows
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
