"""Stored responses in SQLite, for a single gateway."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, QueueFullError, UnavailableError
from common.logs import get_logger
from common.room import SharedRoom
from common.types import Subject
from gateway.stored_responses.store import decode, size_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

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
# Responses that could not be written and wait in memory.
MAX_UNWRITTEN_BYTES = 64 * 2**20
RETRY_AFTER_MS = 1000
# Reads and deletions that may wait for the one thread; a read may take tens of milliseconds.
MAX_PENDING_READS = 64


class SqliteResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    One thread does all work in order, so a read sees earlier writes. Responses that cannot be written, as on a full
    disk, wait in memory, where reads find them; meanwhile, `check` refuses new ones. A corrupt file is renamed, and an
    empty one takes its place.
    """

    def __init__(self, path: Path | None, lifetime_s: float, max_bytes: int) -> None:
        """Open the database at `path`; None keeps it in memory, for the lifetime of this process.

        Responses stay for `lifetime_s`, and use at most `max_bytes` together.

        Raises:
            ConfigurationError: the database cannot be opened.
        """
        self._path = path
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "responses")
        self._room = SharedRoom(MAX_PENDING_WRITES, "being stored", RETRY_AFTER_MS)
        self._reads = SharedRoom(MAX_PENDING_READS, "reading stored responses", RETRY_AFTER_MS)
        self._log = get_logger("responses")
        # By response id; only the thread accesses them.
        self._unwritten: dict[str, _Write] = {}
        self._unwritten_bytes = 0
        # Why the last write failed.
        self._failure: str | None = None
        try:
            self._database = self._open()
        except sqlite3.Error as error:
            raise ConfigurationError(f"responses file {path}: {error}") from error

    def check(self) -> None:
        """Check that the last response could be written.

        Raises:
            UnavailableError: it could not; it is tried again in the meantime.
        """
        if self._failure is not None:
            self._thread.submit(self._write_waiting)
            message = f"Responses cannot be stored now ({self._failure}); 'store': false requests no storing."
            raise UnavailableError(message, retry_after_ms=RETRY_AFTER_MS)

    async def put(self, holder: ResponseOwner, subject: Subject, stored: StoredResponse) -> None:
        """Write a response, after those that wait; one that cannot be written now waits in memory.

        It is written even if its client disconnects at its last byte.
        """
        try:
            self._room.take(subject)
        except QueueFullError as error:
            self._log.error("response.not_stored", reason=str(error))
            return
        loop = asyncio.get_running_loop()
        writing = self._thread.submit(self._write, _Write(holder, subject, stored))
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._note_written, subject, done))
        # The last bytes of a response say that it is stored: a gateway that is killed afterwards must not lose it.
        await asyncio.wait([asyncio.wrap_future(writing)])

    async def find(self, holder: ResponseOwner, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none."""
        return await self._run(holder, lambda: self._select(holder, response_id))

    async def delete(self, holder: ResponseOwner, response_id: str) -> bool:
        """Delete a response of `holder`; return whether it existed."""
        return await self._run(holder, lambda: self._delete(holder, response_id))

    async def close(self) -> None:
        """Write all pending responses and close the database."""
        self._thread.submit(self._write_waiting)
        self._thread.shutdown()
        self._database.close()

    async def _run(self, holder: ResponseOwner, work: Callable[[], T]) -> T:
        subject = Subject(holder.tenant, holder.credential)
        self._reads.take(subject)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            self._log.error("responses.failed", reason=str(error))
            message = f"Stored responses are not available now ({error})."
            raise UnavailableError(message, retry_after_ms=RETRY_AFTER_MS) from error
        finally:
            self._reads.give_back(subject)

    def _note_written(self, subject: Subject, writing: Future[None]) -> None:
        self._room.give_back(subject)
        if (error := writing.exception()) is not None:
            self._log.error("response.not_stored", reason=str(error))

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self._path)
        except sqlite3.DatabaseError as error:
            if self._path is None or not _is_corrupt(error):
                raise
            self._set_aside(self._path, error)
            return _connect(self._path)

    def _set_aside(self, path: Path, error: sqlite3.Error) -> None:
        """Rename a corrupt file and the files that belong to it."""
        suffix = f".corrupt-{time.time_ns()}"
        for part in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{part}").rename(f"{path}{suffix}{part}")
        self._log.error("responses.corrupt", reason=str(error), kept_as=f"{path}{suffix}")

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do `work` in the database; replace a corrupt file, or reopen a read-only one, and try once more."""
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if self._path is None:
                raise
            if _is_corrupt(error):
                self._database.close()
                self._set_aside(self._path, error)
                self._database = self._open()
            elif _has_code(error, sqlite3.SQLITE_READONLY) or isinstance(error, sqlite3.ProgrammingError):
                # A file that was opened on a read-only disk stays so after the disk's repair, also in a second
                # connection beside the first. ProgrammingError: it is closed, as it could not be opened again before.
                self._database.close()
                self._database = self._open()
            else:
                raise
            return work()

    def _write(self, write: _Write) -> None:
        """Write a response after those that wait; if that fails, let it wait too."""
        self._write_waiting()
        try:
            self._guarded(lambda: self._insert(write))
        except sqlite3.Error as error:
            self._failure = str(error)
            if self._unwritten_bytes + write.size > MAX_UNWRITTEN_BYTES:
                raise
            self._unwritten[write.stored.response["id"]] = write
            self._unwritten_bytes += write.size
            self._log.error("response.not_written", reason=str(error), waiting=len(self._unwritten))
        else:
            self._failure = None

    def _write_waiting(self) -> None:
        """Write the responses that wait, until one fails."""
        try:
            for response_id, write in list(self._unwritten.items()):
                self._guarded(lambda write=write: self._insert(write))  # type: ignore[misc]  # bound in the loop
                self._forget_waiting(response_id)
            if self._failure is not None:
                # Nothing may wait any more, and the disk is as full as before.
                self._guarded(self._probe)
                self._failure = None
        except sqlite3.Error as error:
            self._failure = str(error)

    def _probe(self) -> None:
        """Write and remove as much as a small response."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.execute("CREATE TABLE probe (content BLOB) STRICT")
            self._database.execute("INSERT INTO probe VALUES (zeroblob(65536))")
        finally:
            self._database.execute("ROLLBACK")

    def _forget_waiting(self, response_id: str) -> None:
        self._unwritten_bytes -= self._unwritten.pop(response_id).size

    def _insert(self, write: _Write) -> None:
        holder, subject, stored = write.holder, write.subject, write.stored
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
        waiting = self._unwritten.get(response_id)
        if waiting is not None and waiting.belongs_to(holder):
            return waiting.stored
        row = self._guarded(
            lambda: self._database.execute(
                "SELECT response, messages, input FROM stored_responses WHERE id = ? AND tenant = ? AND holder = ? "
                "AND (user IS ? OR ? IS NULL) AND created >= ?",
                (response_id, *_key(holder), time.time() - self._lifetime_s),
            ).fetchone()
        )
        return decode(*row) if row else None

    def _delete(self, holder: ResponseOwner, response_id: str) -> bool:
        waiting = self._unwritten.get(response_id)
        if waiting is not None and waiting.belongs_to(holder):
            self._forget_waiting(response_id)
            return True
        found = self._guarded(
            lambda: self._database.execute(
                "DELETE FROM stored_responses WHERE id = ? AND tenant = ? AND holder = ? AND (user IS ? OR ? IS NULL)",
                (response_id, *_key(holder)),
            )
        )
        return found.rowcount > 0


@dataclass(frozen=True, slots=True)
class _Write:
    """A response to write."""

    holder: ResponseOwner
    subject: Subject
    stored: StoredResponse

    @property
    def size(self) -> int:
        return size_of(self.stored.encode())

    def belongs_to(self, holder: ResponseOwner) -> bool:
        """Whether `holder` may read and delete it."""
        own = self.holder
        is_user = holder.user is None or holder.user == own.user
        return is_user and (holder.tenant, holder.credential) == (own.tenant, own.credential)


def _connect(path: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.executescript(SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _is_corrupt(error: sqlite3.Error) -> bool:
    return _has_code(error, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _has_code(error: sqlite3.Error, *codes: int) -> bool:
    """Whether an error has one of these primary codes."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in codes


def _key(holder: ResponseOwner) -> tuple[str, str, str | None, str | None]:
    return holder.tenant, holder.credential, holder.user, holder.user
