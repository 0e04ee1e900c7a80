"""When to leave a broken back end alone."""

from __future__ import annotations

# So many failures in a row, and nothing is asked for a while, twice as long each time up to the limit.
FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class CircuitBreaker:
    """Closed while calls succeed; open for a pause after several failures; then one call finds out how things are.

    Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        """Start closed."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are held back, but for one now and then."""
        return self._open_until is not None

    def allows(self, now: float) -> bool:
        """Whether a call may be made; after a pause, one is tried until its outcome is known."""
        if self._open_until is None:
            return True
        if self._is_trying or now < self._open_until:
            return False
        self._is_trying = True
        return True

    def succeed(self) -> None:
        """Take note of a call that went well."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = None
        self._is_trying = False

    def fail(self, now: float) -> None:
        """Take note of a call that failed or took too long."""
        self._failures += 1
        if self._open_until is None:
            if self._failures >= FAILURES_TO_OPEN:
                self._open_until = now + self._pause_s
        elif self._is_trying:
            self._is_trying = False
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open_until = now + self._pause_s
