"""The policy for restarts of services that died, and for giving up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays between restarts, and the number of quick deaths after which the supervisor gives up."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    # A service that ran at least this long counts as stable: its next death is the first of a new series.
    stable_after_s: float = 20.0
    # Deaths in a row after which the deployment ends with the last one's log.
    give_up_after: int = 5


class RestartHistory:
    """Counts the quick deaths of one service."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._quick_deaths = 0

    def delay_after(self, lived_s: float) -> float | None:
        """Record a death after `lived_s` seconds; return the delay before the next start in seconds, or None."""
        self._quick_deaths = 1 if lived_s >= self._policy.stable_after_s else self._quick_deaths + 1
        if self._quick_deaths >= self._policy.give_up_after:
            return None
        delay: float = self._policy.first_delay_s * 2 ** (self._quick_deaths - 1)
        return min(delay, self._policy.max_delay_s)
