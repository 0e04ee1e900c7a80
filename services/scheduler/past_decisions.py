"""The last decisions of a cache about who may read an entry, for watchers that come later."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.events import DECISIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.interface import EventSource
    from services.scheduler.cache.types import CacheEvent

# Less than 1 MB.
KEPT_DECISIONS = 1_000
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PastDecision:
    """A decision, taken at `taken_at` seconds of the scheduler's clock. Its node has neither pages nor token ids."""

    event: CacheEvent
    taken_at: float


class PastDecisions:
    """Keeps the last `limit` decisions of one cache, without the text that they are about."""

    def __init__(self, events: EventSource, clock: Callable[[], float], limit: int = KEPT_DECISIONS) -> None:
        """Note the decisions among `events` from now on, with the times of `clock`, in seconds."""
        self._clock = clock
        self._kept: deque[PastDecision] = deque(maxlen=limit)
        events.subscribe(self._note, DECISIONS)

    def latest(self, number: int) -> list[PastDecision]:
        """Return the last `number` decisions, or as many as are kept, oldest first."""
        return list(islice(self._kept, max(0, len(self._kept) - number), None))

    def _note(self, event: CacheEvent) -> None:
        assert event.node is not None, "decisions are about nodes"
        # Pages change hands, and a text that its users have had forgotten must not remain here.
        node = replace(event.node, pages=_NONE, host_pages=None, key=b"")
        self._kept.append(PastDecision(replace(event, node=node), self._clock()))
