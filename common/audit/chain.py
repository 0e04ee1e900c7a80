"""The files of one chain of records: appended to, continued after a crash, and changed for a new one by size."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from common.audit.records import NO_HASH, REPAIRED, AuditRecord, Torn, encode_record, read_records
from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SUFFIX = ".jsonl"
OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
# Processes of one service that may write below one directory.
MAX_CHAINS = 64


def files_of(directory: Path) -> list[Path]:
    """Return the files of a chain, oldest first; each is named after the number of its first record."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.stem.isdigit())


class AuditChain:
    """Owns one chain's directory, which no other process may write to at the same time.

    Files are only appended to, and never renamed or truncated, so they may be on a file system that forbids this.
    """

    def __init__(self, root: Path, service: str, max_file_bytes: int) -> None:
        """Continue the chain `root`/`service`, or `service`-2 and so on if another process has it.

        Raises:
            ConfigurationError: the directory cannot be written.
        """
        self._max_file_bytes = max_file_bytes
        self._descriptor: int | None = None
        self._size = 0
        self._is_suspect = True
        self.sequence = 0
        self.hash = NO_HASH
        try:
            self.directory, self._lock = _claim(root, service)
            self._continue()
        except OSError as error:
            raise ConfigurationError(f"audit.directory {root}: {error}") from error

    def append(self, entries: Sequence[Mapping[str, object]], now: str) -> None:
        """Write records with the given fields, in one piece, and wait until they are durable.

        Args:
            entries: The fields of each record.
            now: The time of a record about a repair, if one is needed.

        Raises:
            OSError: they may not be durable, or not have been written at all; the next call repairs the file.
        """
        if self._is_suspect:
            self._continue()
            self._repair(now)
        if self._descriptor is None or self._size >= self._max_file_bytes:
            self._open(self.directory / f"{self.sequence + 1:012d}{SUFFIX}")
        self._write(entries)

    def close(self) -> None:
        """Close the file, and let other processes continue the chain."""
        self._close_file()
        os.close(self._lock)

    def _write(self, entries: Sequence[Mapping[str, object]]) -> None:
        sequence, digest = self.sequence, self.hash
        lines = []
        for fields in entries:
            sequence += 1
            line, digest = encode_record(sequence, fields, digest)
            lines.append(line)
        content = b"".join(lines)
        self._is_suspect = True
        self._write_all(content)
        self.sequence, self.hash = sequence, digest
        self._is_suspect = False

    def _write_all(self, content: bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(content)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self._size += len(content)

    def _continue(self) -> None:
        """Find the last record, in the newest file that has one, and open the newest file."""
        self._close_file()
        files = files_of(self.directory)
        for path in reversed(files):
            parts = list(read_records(path.read_bytes()))
            last = next((part for part in reversed(parts) if isinstance(part, AuditRecord)), None)
            if last is not None:
                self.sequence, self.hash = last.sequence, last.hash
                break
        else:
            self.sequence, self.hash = 0, NO_HASH
        if files:
            self._open(files[-1])

    def _repair(self, now: str) -> None:
        """Write a record about the bytes after the last record, if there are any: a line that was not completed."""
        if self._descriptor is not None:
            content = os.pread(self._descriptor, self._size, 0)
            parts = list(read_records(content))
            if parts and isinstance(torn := parts[-1], Torn):
                if not content.endswith(b"\n"):
                    self._write_all(b"\n")
                self._write([{"time": now, "action": REPAIRED, "outcome": "done", "what": torn.described()}])
        self._is_suspect = False

    def _open(self, path: Path) -> None:
        self._close_file()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, OWNER_ONLY)
        self._size = os.fstat(self._descriptor).st_size
        os.fsync(self._lock)  # the directory, so that a new file's name is durable

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _claim(root: Path, service: str) -> tuple[Path, int]:
    """Return the directory of a chain that no other process has, and the descriptor that locks it."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(1, MAX_CHAINS + 1):
        directory = root / (service if number == 1 else f"{service}-{number}")
        directory.mkdir(exist_ok=True, mode=0o700)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return directory, lock
    raise ConfigurationError(f"audit.directory {root}: {MAX_CHAINS} processes of {service} write to it already")
