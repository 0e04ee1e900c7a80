"""Locks on files, which the kernel releases when the process that holds one ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FileLock:
    """An exclusive lock that at most one holder on this host has, in whichever process or container."""

    def __init__(self, path: Path) -> None:
        """Start without the lock; the file is created when it is first acquired, with its directory."""
        self._path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object has the lock."""
        return self._file is not None

    def try_acquire(self) -> bool:
        """Return whether this object has the lock now; it does not wait.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._file is not None:
            return True
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Give up the lock, if this object has it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_locked(path: Path) -> bool:
    """Return whether anyone has a lock on the file; False if there is no such file.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
