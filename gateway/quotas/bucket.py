"""A budget that refills steadily."""

from __future__ import annotations


class Bucket:
    """Holds up to one minute's budget and refills at that rate; starts full. Times are monotonic seconds."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        """Begin full."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return what is left; negative if more was used than had been announced."""
        self._level = min(self._level + (now - self._at) * self.per_minute / 60, self.per_minute)
        self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return in how many seconds `amount` can be taken; 0 if now. A full bucket suffices for any amount."""
        lacking = min(amount, self.per_minute) - self.level(now)
        return max(lacking, 0.0) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take `amount`; a negative one gives back."""
        self._level = min(self.level(now) - amount, self.per_minute)

    def full_in_s(self, now: float) -> float:
        """Return in how many seconds it is full."""
        return (self.per_minute - self.level(now)) * 60 / self.per_minute
