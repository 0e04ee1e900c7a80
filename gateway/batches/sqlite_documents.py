"""Files and batches in SQLite: in memory, or in a file that gateways of one machine may share."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    folder TEXT NOT NULL, name TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (folder, name)
) STRICT
"""
# Seconds that a write waits for another process.
BUSY_S = 10.0
RETRY_AFTER_MS = 1000


class SqliteDocuments:
    """Implements `gateway.batches.documents.Documents`. One thread does all work in order."""

    def __init__(self, path: Path | None) -> None:
        """Open the database at `path`; None keeps it in memory, for the lifetime of this process.

        Raises:
            ConfigurationError: the database cannot be opened.
        """
        self._thread = ThreadPoolExecutor(1, "batches")
        self._log = get_logger("batches")
        try:
            self._database = sqlite3.connect(
                path or ":memory:", timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(f"batches file {path}: {error}") from error

    async def get(self, folder: str, name: str) -> bytes | None:
        """Return a document, None if there is none."""
        return (await self.get_many(folder, [name]))[0]

    async def get_many(self, folder: str, names: Sequence[str]) -> list[bytes | None]:
        """Return several documents of a folder; None for each that does not exist."""
        return await self._run(lambda: [self._select(folder, name) for name in names])

    async def names(self, folder: str) -> list[str]:
        """Return the names of a folder's documents, sorted."""
        query = "SELECT name FROM documents WHERE folder = ? ORDER BY name"
        return await self._run(lambda: [name for (name,) in self._database.execute(query, (folder,))])

    async def put(self, folder: str, name: str, content: bytes) -> None:
        """Write a document."""
        await self._run(lambda: self._replace(folder, name, content))

    async def exchange(self, folder: str, name: str, expected: bytes | None, content: bytes | None) -> bool:
        """Replace a document if its content is `expected`; return whether it was."""
        return await self._run(lambda: self._exchange(folder, name, expected, content))

    async def delete(self, folder: str, name: str | None = None) -> None:
        """Delete a document, or a whole folder."""
        await self._run(lambda: self._delete(folder, name))

    async def close(self) -> None:
        self._thread.shutdown()
        self._database.close()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            self._log.error("batches.storage_failed", reason=str(error))
            message = "Files and batches are not available now; try again soon."
            raise UnavailableError(message, retry_after_ms=RETRY_AFTER_MS) from error

    def _select(self, folder: str, name: str) -> bytes | None:
        query = "SELECT content FROM documents WHERE folder = ? AND name = ?"
        row = self._database.execute(query, (folder, name)).fetchone()
        return None if row is None else bytes(row[0])

    def _replace(self, folder: str, name: str, content: bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (folder, name, content))

    def _delete(self, folder: str, name: str | None) -> None:
        self._database.execute(
            "DELETE FROM documents WHERE folder = ? AND (? IS NULL OR name = ?)", (folder, name, name)
        )

    def _exchange(self, folder: str, name: str, expected: bytes | None, content: bytes | None) -> bool:
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits or rolls back
            if self._select(folder, name) != expected:
                return False
            if content is None:
                self._delete(folder, name)
            else:
                self._replace(folder, name, content)
            return True
