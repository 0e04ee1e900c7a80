"""The claim to a device that several models share: an engine has it whenever it has memory there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from common.errors import UnavailableError

if TYPE_CHECKING:
    from common.file_locks import FileLock
    from services.worker.engine.execution.interface import ProgressReport

POLL_S = 0.05
# The worker of a model that lost its turn with its scheduler gives up the device within seconds.
TIMEOUT_S = 60.0


class DeviceClaim(Protocol):
    """The right to use a device."""

    def take(self, report: ProgressReport) -> None:
        """Wait for the right; nothing happens if it is there. `report` is called meanwhile.

        Raises:
            UnavailableError: another engine keeps it.
        """

    def give_back(self) -> None:
        """Let others have it."""


class OwnDevice:
    """A device that no other model uses; see `DeviceClaim`."""

    def take(self, report: ProgressReport) -> None:
        """Do nothing."""

    def give_back(self) -> None:
        """Do nothing."""


class SharedDevice:
    """A device of models that take turns: the schedulers decide whose turn it is, and this holds even if one dies."""

    def __init__(self, lock: FileLock, timeout_s: float = TIMEOUT_S) -> None:
        """Take `lock` for the device."""
        self._lock = lock
        self._timeout_s = timeout_s

    def take(self, report: ProgressReport) -> None:
        """Wait for the lock; see `DeviceClaim.take`."""
        give_up_at = time.monotonic() + self._timeout_s
        while not self._lock.try_acquire():
            if time.monotonic() > give_up_at:
                raise UnavailableError("another model keeps the device")
            report(0.0, "waiting for the device")
            time.sleep(POLL_S)

    def give_back(self) -> None:
        """Release the lock."""
        self._lock.release()
