"""Hands requests back to their gateways while this group has no workers and another group would serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.core import SchedulerCore

# Seconds without workers after which requests are handed back for another group; ranks that restart after an error of a
# step are ready sooner, with the rows' order kept.
HAND_BACK_S = 1.0


class HandBack:
    """Records which tokenizers could send requests to another group, and since when this one has had no workers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._away_since: float | None = None
        self._tokenizers: set[object] = set()
        self._log = get_logger("hand_back")

    @property
    def has_others(self) -> bool:
        """Whether another group would serve requests now."""
        return bool(self._tokenizers)

    def note_others(self, tokenizer: object, *, serve: bool) -> None:
        """Record whether `tokenizer` could send requests to another group."""
        if serve:
            self._tokenizers.add(tokenizer)
        else:
            self._tokenizers.discard(tokenizer)

    def check(self, core: SchedulerCore, *, is_group_ready: bool, at_once: bool = False) -> None:
        """End all requests with a retryable error if the workers stay away and another group would serve them.

        `at_once`: the workers are not waited for.
        """
        if is_group_ready:
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = self._clock()
        if at_once:
            self._away_since = self._clock() - HAND_BACK_S
        if self.has_others and self._clock() - self._away_since >= HAND_BACK_S and any(core.open_sequences):
            self._log.warning("requests.handed_back", requests=sum(1 for _ in core.open_sequences))
            core.fail_all(UnavailableError("the workers of this group are away", retry_after_ms=1000))
