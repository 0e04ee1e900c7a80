"""Stored responses in SQLite, for a single gateway."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, QueueFullError
from common.logs import get_logger
from common.room import SharedRoom
from common.types import Subject
from gateway.stored_responses.store import decode, size_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from gateway.stored_responses.store import ResponseOwner, StoredResponse

T = TypeVar("T")

# The dropped tables are those of earlier versions: in `responses` a user's name could equal that of a key, and
# `held_responses` did not store the accountable subject. `sequence` orders responses, even those of the same instant.
SCHEMA = """
DROP TABLE IF EXISTS responses;
DROP TABLE IF EXISTS held_responses;
CREATE TABLE IF NOT EXISTS stored_responses (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL, holder TEXT NOT NULL, user TEXT, created REAL NOT NULL,
    response BLOB NOT NULL, messages BLOB NOT NULL, input BLOB NOT NULL,
    room_tenant TEXT NOT NULL, room_subject TEXT NOT NULL, size INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS stored_responses_by_subject
    ON stored_responses (room_tenant, room_subject, sequence, size);
CREATE INDEX IF NOT EXISTS stored_responses_by_age ON stored_responses (created);
"""
# Writes that may wait for the disk; further responses are not stored, which is logged.
MAX_PENDING_WRITES = 1_000
RETRY_AFTER_MS = 1000
# Reads and deletions that may wait for the one thread; a read may take tens of milliseconds.
MAX_PENDING_READS = 64


class SqliteResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    One thread does all work in order, so a read sees earlier writes.
    """

    def __init__(self, path: Path | None, lifetime_s: float, max_bytes: int) -> None:
        """Open the database at `path`; None keeps it in memory, for the lifetime of this process.

        Responses stay for `lifetime_s`, and use at most `max_bytes` together.

        Raises:
            ConfigurationError: the database cannot be opened.
        """
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "responses")
        self._room = SharedRoom(MAX_PENDING_WRITES, "being stored", RETRY_AFTER_MS)
        self._reads = SharedRoom(MAX_PENDING_READS, "reading stored responses", RETRY_AFTER_MS)
        self._log = get_logger("responses")
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(f"responses file {path}: {error}") from error

    def check(self) -> None:
        """A local database is always available."""

    async def put(self, holder: ResponseOwner, subject: Subject, stored: StoredResponse) -> None:
        """Queue a response for writing and return; later reads see it."""
        try:
            self._room.take(subject)
        except QueueFullError as error:
            self._log.error("response.not_stored", reason=str(error))
            return
        loop = asyncio.get_running_loop()
        writing = self._thread.submit(self._insert, holder, subject, stored)
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._note_written, subject, done))

    async def find(self, holder: ResponseOwner, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none."""
        return await self._run(holder, lambda: self._select(holder, response_id))

    async def delete(self, holder: ResponseOwner, response_id: str) -> bool:
        """Delete a response of `holder`; return whether it existed."""
        return await self._run(holder, lambda: self._delete(holder, response_id))

    async def close(self) -> None:
        """Write all pending responses and close the database."""
        self._thread.shutdown()
        self._database.close()

    async def _run(self, holder: ResponseOwner, work: Callable[[], T]) -> T:
        subject = Subject(holder.tenant, holder.credential)
        self._reads.take(subject)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._reads.give_back(subject)

    def _note_written(self, subject: Subject, writing: Future[None]) -> None:
        self._room.give_back(subject)
        if (error := writing.exception()) is not None:
            self._log.error("response.not_stored", reason=str(error))

    def _insert(self, holder: ResponseOwner, subject: Subject, stored: StoredResponse) -> None:
        now = time.time()
        texts = stored.encode()
        size = size_of(texts)
        if size > self._max_bytes:
            self._log.error("response.not_stored", reason=f"it has {size} bytes, and there is room for fewer")
            return
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits or rolls back
            self._database.execute("DELETE FROM stored_responses WHERE created < ?", (now - self._lifetime_s,))
            self._database.execute(
                "INSERT INTO stored_responses (id, tenant, holder, user, created, response, messages, input, "
                "room_tenant, room_subject, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.response["id"],
                    holder.tenant,
                    holder.credential,
                    holder.user,
                    now,
                    *texts,
                    subject.tenant,
                    subject.name,
                    size,
                ),
            )
            self._make_room()

    def _make_room(self) -> None:
        """Delete responses by the rule in `store.py` until the rest fits into `max_bytes`."""
        [used] = self._database.execute("SELECT SUM(size) FROM stored_responses").fetchone()
        excess = used - self._max_bytes
        while excess > 0:
            [tenant] = self._database.execute(
                "SELECT room_tenant FROM stored_responses GROUP BY 1 ORDER BY SUM(size) DESC, MIN(sequence) LIMIT 1"
            ).fetchone()
            [subject] = self._database.execute(
                "SELECT room_subject FROM stored_responses WHERE room_tenant = ? GROUP BY 1 "
                "ORDER BY SUM(size) DESC, MIN(sequence) LIMIT 1",
                (tenant,),
            ).fetchone()
            sequence, freed = self._database.execute(
                "SELECT sequence, size FROM stored_responses WHERE room_tenant = ? AND room_subject = ? "
                "ORDER BY sequence LIMIT 1",
                (tenant, subject),
            ).fetchone()
            self._database.execute("DELETE FROM stored_responses WHERE sequence = ?", (sequence,))
            excess -= freed

    def _select(self, holder: ResponseOwner, response_id: str) -> StoredResponse | None:
        row = self._database.execute(
            "SELECT response, messages, input FROM stored_responses WHERE id = ? AND tenant = ? AND holder = ? "
            "AND (user IS ? OR ? IS NULL) AND created >= ?",
            (response_id, *_key(holder), time.time() - self._lifetime_s),
        ).fetchone()
        return decode(*row) if row else None

    def _delete(self, holder: ResponseOwner, response_id: str) -> bool:
        found = self._database.execute(
            "DELETE FROM stored_responses WHERE id = ? AND tenant = ? AND holder = ? AND (user IS ? OR ? IS NULL)",
            (response_id, *_key(holder)),
        )
        return found.rowcount > 0


def _key(holder: ResponseOwner) -> tuple[str, str, str | None, str | None]:
    return holder.tenant, holder.credential, holder.user, holder.user
