"""Holds back calls of a service that keeps failing."""

from __future__ import annotations

# So many failures in a row, and nothing is asked for a while, twice as long each time up to the limit. A server that
# does not answer costs each request the whole time limit, so fewer such failures suffice.
FAILURES_TO_OPEN = 3
SILENCES_TO_OPEN = 2
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class CircuitBreaker:
    """Closed while calls succeed; open for a pause after several failures; then one call finds out how things are.

    Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        """Start closed."""
        self._failures = self._silences = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are held back, but for one now and then."""
        return self._open_until is not None

    def is_ready(self, now: float) -> bool:
        """Whether a call may be made; after a pause, none while the outcome of one is awaited."""
        return self._open_until is None or (not self._is_trying and now >= self._open_until)

    def begin(self) -> None:
        """Take note of a call that is made; after a pause, no other one may be until its outcome is known."""
        self._is_trying = self.is_open

    def allows(self, now: float) -> bool:
        """Begin a call, if one may be made; return whether it may."""
        is_ready = self.is_ready(now)
        if is_ready:
            self.begin()
        return is_ready

    def succeed(self) -> None:
        """Take note of a call that went well."""
        self._failures = self._silences = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = None
        self._is_trying = False

    def fail(self, now: float, *, is_silent: bool = False) -> None:
        """Take note of a call that failed, or with `is_silent` of one that got no answer in time."""
        self._failures += 1
        self._silences += is_silent
        if self._open_until is None:
            if self._failures >= FAILURES_TO_OPEN or self._silences >= SILENCES_TO_OPEN:
                self._open_until = now + self._pause_s
        elif self._is_trying:
            self._is_trying = False
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open_until = now + self._pause_s
