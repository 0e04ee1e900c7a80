"""Decides whether the next plan is made at once, or shortly before the running pass ends."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

# While a pass runs that is expected to take less, the next plan is made at once.
LONG_PASS_S: Final = 0.03
# The next plan is made at least so long before the end of a pass: workers need some milliseconds to start it.
LEAST_LEAD_S: Final = 0.01
# And as many means of the time by which passes ended too early, of which each pass changes this share.
ERRORS_OF_LEAD: Final = 2.5
ERROR_WEIGHT: Final = 0.1


class PlanPacing:
    """Expects how long passes with prompts take, and lets a second plan wait until the first one has almost ended.

    So requests that arrive during a long pass are in the next one, instead of in the one after it. Where the pass ends
    earlier than expected, the device waits; so plans are held back only once it is known how far off expectations are.
    """

    def __init__(
        self, clock: Callable[[], float], later: Callable[[float], asyncio.TimerHandle], *, holds_back: bool
    ) -> None:
        """Tell time by `clock`, in seconds; `later` schedules a turn after so many seconds.

        Unless it `holds_back`, it is never too early.
        """
        self._holds_back = holds_back
        self._clock = clock
        self._later = later
        self._alarm: asyncio.TimerHandle | None = None
        # When the newest plan was sent, or the one before it ended.
        self._began = 0.0
        # Of the plans in flight, oldest first.
        self._expected_s: deque[float] = deque()
        self._error_s: float | None = None

    def sent(self, expected_s: float) -> None:
        """Note that a plan is sent, whose passes are expected to take `expected_s`; 0: that is not known."""
        self._expected_s.append(expected_s)
        if len(self._expected_s) == 1:
            self._began = self._clock()

    def ended(self) -> None:
        """Note that the oldest plan in flight has ended; the next one has begun."""
        now = self._clock()
        expected = self._expected_s.popleft() if self._expected_s else 0.0
        if expected:
            error = max(0.0, self._began + expected - now)
            before = error if self._error_s is None else self._error_s
            self._error_s = before + ERROR_WEIGHT * (error - before)
        self._began = now

    def lost(self) -> None:
        """Forget the plans in flight, with the workers that had them."""
        self._expected_s.clear()

    def is_early(self) -> bool:
        """Return whether it is too early for another plan; then another turn comes when it is due."""
        if not self._holds_back or len(self._expected_s) != 1 or self._error_s is None:
            return False
        if self._expected_s[0] < LONG_PASS_S:
            return False
        lead = LEAST_LEAD_S + ERRORS_OF_LEAD * self._error_s
        wait = self._began + self._expected_s[0] - lead - self._clock()
        if wait <= 0:
            return False
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._later(wait)
        return True
