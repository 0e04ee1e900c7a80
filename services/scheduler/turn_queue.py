"""Turns on a device: a lock, and tickets of those that wait for it, in one directory.

A ticket is a file that its owner keeps locked, named by the time since which it waits. Those who die lose lock and
ticket, so nothing has to be cleaned up before others go on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from common.file_locks import FileLock, is_locked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TURN: Final = "turn"
TICKETS: Final = "waiting"
# Wide enough for a century of nanoseconds, so that names sort by time.
DIGITS: Final = 19


class TurnQueue:
    """One of those that take turns. Turns go to the one that has waited longest."""

    def __init__(self, directory: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Wait for nothing yet; all that share `directory` take turns. `clock` is the same for all of them."""
        self._tickets = directory / TICKETS
        self._clock = clock
        self._turn = FileLock(directory / TURN)
        self._ticket: Path | None = None
        self._ticket_lock: FileLock | None = None

    @property
    def has_turn(self) -> bool:
        """Whether it is this one's turn."""
        return self._turn.is_held

    @property
    def is_waiting(self) -> bool:
        """Whether this one has a ticket."""
        return self._ticket is not None

    def ask(self) -> None:
        """Wait for a turn from now on, unless this one waits already.

        Raises:
            OSError: the directory cannot be written.
        """
        if self._ticket is not None:
            return
        name = f"{self._clock():0{DIGITS}}-{uuid4().hex}"
        # Others see the ticket once it is locked: they delete those that are not.
        draft, ticket = self._tickets / f".{name}", self._tickets / name
        lock = FileLock(draft)
        lock.try_acquire()
        draft.rename(ticket)
        self._ticket, self._ticket_lock = ticket, lock

    def try_take(self) -> bool:
        """Take the turn if it is free and no other has waited longer; return whether this one has it now.

        Raises:
            OSError: the directory cannot be read.
        """
        if self._turn.is_held:
            return True
        waiting = self._waiting()
        if self._ticket is None or not waiting or waiting[0] != self._ticket or not self._turn.try_acquire():
            return False
        self.leave()
        return True

    @property
    def others_wait(self) -> bool:
        """Whether others wait for a turn."""
        return any(ticket != self._ticket for ticket in self._waiting())

    def leave(self) -> None:
        """Wait no longer."""
        if self._ticket is not None and self._ticket_lock is not None:
            self._ticket.unlink(missing_ok=True)
            self._ticket_lock.release()
        self._ticket = self._ticket_lock = None

    def release(self) -> None:
        """End this one's turn, if it has one."""
        self._turn.release()

    def _waiting(self) -> list[Path]:
        """Return the tickets of those that are alive, and delete the others'."""
        if not self._tickets.exists():
            return []
        alive = []
        for ticket in sorted(path for path in self._tickets.iterdir() if not path.name.startswith(".")):
            if is_locked(ticket):
                alive.append(ticket)
            else:
                ticket.unlink(missing_ok=True)
        return alive
