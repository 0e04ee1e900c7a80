"""Bounds on what an attack may ask of a server that serves others as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.evaluation.bench.clock import Clock


class BudgetSpentError(Exception):
    """A run has made all requests that it may."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most requests of one attack, and the most in a second."""

    requests: int
    per_second: float


class Allowance:
    """Spends a budget: requests are sent at its rate, one after the other, and none beyond it."""

    def __init__(self, budget: Budget, clock: Clock) -> None:
        """Start with the whole budget."""
        self._budget = budget
        self._clock = clock
        self._next_at = clock.now()
        self.spent = 0

    async def take(self) -> None:
        """Wait until the next request may be sent.

        Raises:
            BudgetSpentError: the budget is spent.
        """
        if self.spent >= self._budget.requests:
            raise BudgetSpentError(f"the budget of {self._budget.requests} requests is spent (--max-requests)")
        self.spent += 1
        now = self._clock.now()
        starts_at = max(self._next_at, now)
        self._next_at = starts_at + 1 / self._budget.per_second
        await self._clock.sleep(starts_at - now)
