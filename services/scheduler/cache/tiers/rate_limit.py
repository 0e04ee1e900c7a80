"""The limit of what is read from storage per second."""

from __future__ import annotations


class RateLimit:
    """A limit of units per second, with a burst of one second's worth. Times are seconds of one clock."""

    def __init__(self, per_second: float) -> None:
        """Allow `per_second` units; 0: unlimited."""
        self._per_second = per_second
        self._level = per_second
        self._updated_at: float | None = None

    def available(self, now: float) -> float:
        """Return the number of units that may be taken now; changes nothing."""
        if not self._per_second:
            return float("inf")
        since = 0.0 if self._updated_at is None else now - self._updated_at
        return min(self._level + since * self._per_second, self._per_second)

    def take(self, amount: float, now: float) -> None:
        """Take units; a debt is paid off over time."""
        if self._per_second:
            self._level, self._updated_at = self.available(now) - amount, now
