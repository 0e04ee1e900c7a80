"""The usage log: a line of JSON for each request, in one file per day, exactly once.

The ledger's store is a transactional outbox: an increase and its record are stored together, records are appended to
the log in the order of their numbers, and forgotten when the log is on the disk. After a crash in between, the log's
last line says which records it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

from common.errors import ConfigurationError, UnavailableError
from common.file_locks import FileLock
from common.logs import get_logger
from gateway.ledger.entries import CACHE_AMOUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.ledger.entries import LedgerStore, UsageRecord, UsageRecords

INTERVAL_S = 1.0
# Longer than two lines, whose names are bounded.
TAIL_BYTES = 2**16
FILES = "usage-*.jsonl"
NAME = "name"
LOCK = "lock"


class NoUsageLog:
    """Stands in where no usage log is configured."""

    async def run(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class UsageLog:
    """The usage log of one gateway, in a directory of its own."""

    def __init__(self, directory: Path, store: LedgerStore, clock: Callable[[], float] = time.time) -> None:
        """Continue the log in `directory`, which exists; `clock` is Unix time in seconds.

        Raises:
            ConfigurationError: another process writes it, or it cannot be read.
        """
        self._directory = directory
        self._store = store
        self._clock = clock
        self._log = get_logger("usage_log")
        # A cancelled `write` does not wait for its thread, which goes on.
        self._appending = threading.Lock()
        self._lock = FileLock(directory / LOCK)
        try:
            if not self._lock.try_acquire():
                raise ConfigurationError(f"gateway.ledger.log_directory: another gateway writes {directory}")
            # The number of the last line of each ledger, by its name.
            self._written = self._last_lines()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"gateway.ledger.log_directory: {error}") from error

    async def run(self) -> None:
        """Write records as they come, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.write()

    async def write(self) -> None:
        """Write all records that are due; what fails is tried again by the next call."""
        try:
            while True:
                taken = await self._store.take_records(int(self._clock()))
                if not taken.records:
                    return
                await asyncio.to_thread(self._append_new, taken)
                await self._store.forget_records(taken.records[-1].number)
        except (UnavailableError, OSError) as error:
            self._log.error("usage_log.late", reason=str(error))

    async def close(self) -> None:
        """Write what is due and release the directory."""
        await self.write()
        self._lock.release()

    def _append_new(self, taken: UsageRecords) -> None:
        with self._appending:
            last = self._written.get(taken.ledger, 0)
            new = [record for record in taken.records if record.number > last]
            if new:
                self._append(taken.ledger, new)

    def _append(self, ledger: str, records: Sequence[UsageRecord]) -> None:
        lines = b"".join(_line(ledger, record) for record in records)
        day = datetime.fromtimestamp(self._clock(), UTC).date()
        path = self._directory / f"usage-{day.isoformat()}.jsonl"
        is_new = not path.exists()
        with path.open("ab") as file:
            size = file.tell()
            try:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
        if is_new:
            _sync_directory(self._directory)
        self._written[ledger] = records[-1].number

    def _last_lines(self) -> dict[str, int]:
        """Return each ledger's greatest number, and cut off what a crash left of a line.

        All files are read, as a clock that was set back has had later lines written to an earlier day's file.
        """
        found: dict[str, int] = {}
        for path in self._directory.glob(FILES):
            with path.open("rb") as file:
                start = max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0)
                file.seek(start)
                tail = file.read()
            end = tail.rfind(b"\n") + 1
            if end < len(tail):
                os.truncate(path, start + end)
            if end:
                line = orjson.loads(tail[tail.rfind(b"\n", 0, end - 1) + 1 : end])
                ledger = str(line["ledger"])
                found[ledger] = max(found.get(ledger, 0), int(line["number"]))
        return found


def open_directory(directory: Path) -> str:
    """Create the directory of a usage log if it is missing, and return the name of its log, which is drawn once.

    Raises:
        ConfigurationError: it cannot be created or written.
    """
    path = directory / NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = secrets.token_hex(8)
        draft = directory / f".{NAME}-{name}"
        draft.write_text(name)
        draft.replace(path)
        _sync_directory(directory)
    except OSError as error:
        raise ConfigurationError(f"gateway.ledger.log_directory: {error}") from error
    return name


def _line(ledger: str, record: UsageRecord) -> bytes:
    tokens = record.tokens._asdict()
    cached = {name: tokens.pop(name) for name in CACHE_AMOUNTS}
    fields = {
        "ledger": ledger,
        "number": record.number,
        "time": datetime.fromtimestamp(record.at, UTC).isoformat().replace("+00:00", "Z"),
        "request_id": record.request_id,
        "tenant": record.subject.tenant,
        "subject": record.subject.name,
        "model": record.work.model,
        "adapter": record.work.adapter or None,
        "operation": record.work.operation or None,
        "batch": record.work.is_batch,
        **tokens,
        "cached": {name.removesuffix("_tokens"): amount for name, amount in cached.items() if amount},
    }
    return orjson.dumps(fields) + b"\n"


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
