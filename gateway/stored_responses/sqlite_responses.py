"""Stored responses in SQLite, for a single gateway."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import orjson

from common.errors import ConfigurationError
from common.logs import get_logger
from gateway.stored_responses.store import HOLDERS_SHARE, StoredResponse

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from gateway.stored_responses.store import Holder

T = TypeVar("T")

# `responses` was the table of earlier versions, whose holders had no kind: a user's name could equal that of a key.
SCHEMA = """
DROP TABLE IF EXISTS responses;
CREATE TABLE IF NOT EXISTS held_responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, holder TEXT NOT NULL, user TEXT, created REAL NOT NULL,
    response BLOB NOT NULL, messages BLOB NOT NULL, input BLOB NOT NULL, size INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS held_responses_by_holder ON held_responses (tenant, holder, created, size);
CREATE INDEX IF NOT EXISTS held_responses_by_age ON held_responses (created, size);
"""
# Writes that may wait for the disk; beyond that responses are not kept, which is logged.
MAX_PENDING_WRITES = 1_000


class SqliteResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    All work is done in one thread, in order, so a read sees earlier writes.
    """

    def __init__(self, path: Path | None, lifetime_s: float, max_bytes: int) -> None:
        """Open the database; None keeps it in memory, as long as this process lives.

        Responses stay for `lifetime_s`; beyond `max_bytes` the oldest go.

        Raises:
            ConfigurationError: it cannot be opened.
        """
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "responses")
        self._pending = 0
        self._log = get_logger("responses")
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(f"responses file {path}: {error}") from error

    def check(self) -> None:
        """Return: a file is always there."""

    async def put(self, holder: Holder, stored: StoredResponse) -> None:
        """Keep a response; returns at once, and later reads see it."""
        if self._pending >= MAX_PENDING_WRITES:
            self._log.error("response.not_stored", reason="too many writes are pending")
            return
        self._pending += 1
        loop = asyncio.get_running_loop()
        writing = self._thread.submit(self._insert, holder, stored)
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._note_written, done))

    async def find(self, holder: Holder, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none."""
        return await self._run(lambda: self._select(holder, response_id))

    async def delete(self, holder: Holder, response_id: str) -> bool:
        """Forget a response of `holder`; return whether there was one."""
        return await self._run(lambda: self._delete(holder, response_id))

    async def close(self) -> None:
        """Write what is pending and close."""
        self._thread.shutdown()
        self._database.close()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _note_written(self, writing: Future[None]) -> None:
        self._pending -= 1
        if (error := writing.exception()) is not None:
            self._log.error("response.not_stored", reason=str(error))

    def _insert(self, holder: Holder, stored: StoredResponse) -> None:
        now = time.time()
        texts = [orjson.dumps(part) for part in (stored.response, stored.messages, stored.input)]
        size = sum(map(len, texts))
        self._database.execute("DELETE FROM held_responses WHERE created < ?", (now - self._lifetime_s,))
        self._make_room(size, self._max_bytes // HOLDERS_SHARE, " WHERE tenant = ? AND holder = ?", holder)
        self._make_room(size, self._max_bytes, "", None)
        self._database.execute(
            "INSERT INTO held_responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (stored.response["id"], holder.tenant, holder.credential, holder.user, now, *texts, size),
        )

    def _make_room(self, size: int, limit: int, where: str, holder: Holder | None) -> None:
        """Delete the oldest responses until `size` more bytes fit into `limit`."""
        of = (holder.tenant, holder.credential) if holder else ()
        [used] = self._database.execute(f"SELECT COALESCE(SUM(size), 0) FROM held_responses{where}", of).fetchone()
        excess = used + size - limit
        if excess <= 0:
            return
        oldest = self._database.execute(f"SELECT id, size FROM held_responses{where} ORDER BY created", of).fetchall()
        for response_id, freed in oldest:
            if excess <= 0:
                return
            self._database.execute("DELETE FROM held_responses WHERE id = ?", (response_id,))
            excess -= freed

    def _select(self, holder: Holder, response_id: str) -> StoredResponse | None:
        row = self._database.execute(
            "SELECT response, messages, input FROM held_responses WHERE id = ? AND tenant = ? AND holder = ? "
            "AND (user IS ? OR ? IS NULL) AND created >= ?",
            (response_id, *_key(holder), time.time() - self._lifetime_s),
        ).fetchone()
        return StoredResponse(*map(orjson.loads, row)) if row else None

    def _delete(self, holder: Holder, response_id: str) -> bool:
        found = self._database.execute(
            "DELETE FROM held_responses WHERE id = ? AND tenant = ? AND holder = ? AND (user IS ? OR ? IS NULL)",
            (response_id, *_key(holder)),
        )
        return found.rowcount > 0


def _key(holder: Holder) -> tuple[str, str, str | None, str | None]:
    return holder.tenant, holder.credential, holder.user, holder.user
