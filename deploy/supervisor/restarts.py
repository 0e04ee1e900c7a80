"""When a service that died starts again, and when trying makes no sense any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient the supervisor is."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    # A service that lived at least so long had worked: its next death is the first of a new series.
    stable_after_s: float = 20.0
    # Deaths in a row after which the deployment ends with the last one's log.
    give_up_after: int = 5


class RestartHistory:
    """Counts the quick deaths of one service."""

    def __init__(self, policy: RestartPolicy) -> None:
        """Start without any death."""
        self._policy = policy
        self._quick_deaths = 0

    def delay_after(self, lived_s: float) -> float | None:
        """Record a death after `lived_s` seconds; return how long to wait before the next start, None to give up."""
        self._quick_deaths = 1 if lived_s >= self._policy.stable_after_s else self._quick_deaths + 1
        if self._quick_deaths >= self._policy.give_up_after:
            return None
        delay: float = self._policy.first_delay_s * 2 ** (self._quick_deaths - 1)
        return min(delay, self._policy.max_delay_s)
