"""Compile seconds that each subject may use: a bucket that a minute refills."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.grammars import GrammarScope

REFILL_S = 60.0
# Subjects that owe something; beyond that, those that owe least are forgotten.
MAX_SUBJECTS = 65_536


class CompileBudget:
    """Counts what subjects have used lately. A subject may go into debt by one compilation, which it then waits off."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """Allow `seconds` of compiling a minute."""
        self._seconds = seconds
        self._clock = clock
        # Seconds used and not yet refilled, and when that was so.
        self._used: dict[tuple[str, str], tuple[float, float]] = {}

    def charge(self, scope: GrammarScope, seconds: float) -> None:
        """Count seconds of compiling."""
        used = self._used_now(scope) + seconds
        self._used[scope.tenant, scope.subject] = (used, self._clock())
        if len(self._used) > MAX_SUBJECTS:
            now = self._clock()
            self._used = {key: entry for key, entry in self._used.items() if self._left(entry, now) > 0}
        if len(self._used) > MAX_SUBJECTS:
            del self._used[min(self._used, key=lambda key: self._left(self._used[key], self._clock()))]

    def wait_s(self, scope: GrammarScope) -> float:
        """Return after how many seconds a subject may compile again; 0: now."""
        return max(0.0, self._used_now(scope) - self._seconds) * REFILL_S / self._seconds

    def _used_now(self, scope: GrammarScope) -> float:
        entry = self._used.get((scope.tenant, scope.subject))
        return 0.0 if entry is None else self._left(entry, self._clock())

    def _left(self, entry: tuple[float, float], now: float) -> float:
        used, at = entry
        return max(0.0, used - (now - at) * self._seconds / REFILL_S)
