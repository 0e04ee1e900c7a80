"""One Execute stream: plans on their way to the engine's thread, results on their way back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from common.steps import StepPlan, StepResult

# Plans that are taken from the stream before their last result is written; gRPC holds back the peer beyond that.
MAX_OPEN_PLANS = 64


class SessionEndedError(Exception):
    """The stream is over; whatever still computes for it may stop."""


class ExecuteSession:
    """Belongs to the event loop, but for `is_ended`, which the engine's thread reads and may set."""

    def __init__(self, dispatch: Callable[[ExecuteSession, StepPlan], None]) -> None:
        """Start empty; `dispatch` hands a plan to the engine's thread."""
        # Once true, nothing more is computed for this session.
        self.is_ended = False
        self._dispatch = dispatch
        self._credits = asyncio.Semaphore(MAX_OPEN_PLANS)
        self._open_plans = 0
        self._has_all_plans = False
        self._outcomes: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()

    async def submit(self, plan: StepPlan) -> None:
        """Queue a plan; waits while too many are open."""
        await self._credits.acquire()
        if not self.is_ended:
            self._open_plans += 1
            self._dispatch(self, plan)

    def finish_input(self) -> None:
        """Say that no more plans come; results end with those of the last plan."""
        self._has_all_plans = True
        self._end_if_done()

    def deliver(self, result: StepResult) -> None:
        """Take a result from the engine."""
        self._outcomes.put_nowait(result)

    def end(self, error: Exception | None = None) -> None:
        """Compute nothing more; `results` ends, with `error` if there is one, after what was delivered."""
        self.is_ended = True
        self._outcomes.put_nowait(error)

    async def results(self) -> AsyncIterator[StepResult]:
        """Yield results until the end; a plan counts as open until its last result is consumed.

        Raises:
            Exception: what `end` was given.
        """
        while True:
            outcome = await self._outcomes.get()
            if outcome is None:
                return
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.last:
                self._open_plans -= 1
                self._credits.release()
                self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_all_plans and not self._open_plans:
            self._outcomes.put_nowait(None)
