"""Whoever has had least goes first, and among those that have had about as little, the longest cached prefix."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import ShareKey, VirtualCounters

# A principal's counter, the handle of its oldest sequence (so that ties are by arrival), and who it is.
_Entry = tuple[float, int, "ShareKey"]


class FairShare:
    """Orders by virtual token counters, with `slack_tokens` of freedom that longest-prefix order uses.

    A principal may be preferred for its cached prefix only while its counter is at most `slack_tokens` above the lowest
    of all that wait. So the counters of two principals that keep waiting never lie further apart than the slack plus
    the larger of the longest prompt and the output weight × tokens of all running rows, and what they are given over
    any time differs by at most twice that: the paper's bound with the slack added to it.
    """

    def __init__(self, counters: VirtualCounters, slack_tokens: float = 512.0, window: int = 128) -> None:
        """Read `counters`, which somebody else keeps; match at most `window` sequences at a time."""
        assert slack_tokens >= 0
        assert window > 0
        self._counters = counters
        self._slack = slack_tokens
        self._window = window

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield one sequence after the other; what the caller charges for one counts for the choice of the next."""
        queues: defaultdict[ShareKey, deque[Sequence]] = defaultdict(deque)
        key_of = self._counters.key
        for sequence in waiting:
            queues[key_of(sequence.request.view.subject)].append(sequence)
        heap = [self._entry(*item) for item in queues.items()]
        heapq.heapify(heap)
        matched: dict[int, int] = {}

        def length(sequence: Sequence) -> int:
            if sequence.handle not in matched:
                matched[sequence.handle] = match(sequence)
            return matched[sequence.handle]

        while heap:
            nearest = self._nearest(heap)
            depth = max(1, self._window // len(nearest))
            candidates = [sequence for _, _, key in nearest for sequence in islice(queues[key], depth)]
            # `max` keeps the first of equals, and the nearest come by counter and arrival.
            chosen = max(candidates, key=length) if len(candidates) > 1 else candidates[0]
            queues[self._counters.key(chosen.request.view.subject)].remove(chosen)
            yield chosen
            for _, _, key in nearest:
                if queues[key]:
                    heapq.heappush(heap, self._entry(key, queues[key]))

    def _nearest(self, heap: list[_Entry]) -> list[_Entry]:
        """Take the principals out of the heap whose counters are near enough to the lowest, lowest first."""
        nearest = [heapq.heappop(heap)]
        limit = nearest[0][0] + self._slack
        while heap and heap[0][0] <= limit and len(nearest) < self._window:
            nearest.append(heapq.heappop(heap))
        return nearest

    def _entry(self, key: ShareKey, queue: deque[Sequence]) -> _Entry:
        return self._counters.counter(key), queue[0].handle, key
