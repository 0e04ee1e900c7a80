"""Decides when an interrupted choice is submitted again, and when the gateway gives up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import ErrorCode

if TYPE_CHECKING:
    from common.types import RequestFailure
    from gateway.generation.journal import ChoiceRecord


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Limits on resubmission while parts of the pipeline are unavailable.

    A request that was never admitted waits only `admission_deadline_s`: its client has seen no output and can go
    elsewhere. An admitted one may wait `deadline_s` for its next token and fail `attempts` times in all, so that a
    request that crashes its worker does not do so forever.
    """

    attempts: int = 5
    deadline_s: float = 60.0
    admission_deadline_s: float = 10.0
    first_delay_s: float = 0.05
    max_delay_s: float = 0.5

    def delay(self, choice: ChoiceRecord, failure: RequestFailure, now: float) -> float | None:
        """Return the seconds until `choice` is submitted again after `failure`; None to give up.

        `now` and `choice.interrupted_at` are readings of the same monotonic clock, in seconds.
        """
        if not _passes_by_waiting(choice, failure) or choice.failures > self.attempts:
            return None
        since = now if choice.interrupted_at is None else choice.interrupted_at
        limit = self.deadline_s if choice.was_admitted else self.admission_deadline_s
        delay = min(self.first_delay_s * 2.0 ** min(choice.tries, 16), self.max_delay_s)
        return delay if now + delay <= since + limit else None


def _passes_by_waiting(choice: ChoiceRecord, failure: RequestFailure) -> bool:
    if not failure.retryable:
        return False
    if failure.code is ErrorCode.QUEUE_FULL:
        # A new request is refused with a retry hint; an admitted one keeps trying.
        return choice.was_admitted
    return failure.code is ErrorCode.UNAVAILABLE
