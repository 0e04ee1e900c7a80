"""Longest cached prefix first."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from services.scheduler.core.sequence import Sequence


class LongestPrefixMatch:
    """Starts sequences that need the least prefill first, while the prefixes they share are still cached.

    Work per round is bounded: only a window of `window` sequences is matched, the others follow by arrival. The window
    is divided equally among the waiting tenants, and each part among the tenant's subjects; unused places go to the
    oldest sequences. So a flood by one subject does not displace the others. No sequence starves: those that arrived
    more than `patience_s` before the newest one go first, by arrival.
    """

    def __init__(self, window: int = 128, patience_s: float = 30.0) -> None:
        """Match at most `window` sequences; only those arriving within `patience_s` after one can overtake it."""
        assert window > 0
        assert patience_s >= 0
        self._window = window
        self._patience_s = patience_s

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield overdue sequences by arrival, then the window by match and arrival, then the others by arrival."""
        by_arrival = list(waiting)
        if not by_arrival:
            return
        # Relative to the newest arrival rather than to now: without new arrivals no sequence is overtaken indefinitely.
        deadline = by_arrival[-1].arrived_at - self._patience_s
        impatient = next(index for index, sequence in enumerate(by_arrival) if sequence.arrived_at >= deadline)
        yield from islice(by_arrival, impatient)
        window, others = self._divide(by_arrival[impatient:])
        yield from sorted(window, key=match, reverse=True)
        yield from others

    def _divide(self, waiting: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the window and the others, both by arrival."""
        if len(waiting) <= self._window:
            return waiting, []
        subjects = {sequence.request.view.subject for sequence in waiting}
        tenants = Counter(subject.tenant for subject in subjects)
        part = max(1, self._window // len(tenants))
        taken: Counter[object] = Counter()
        chosen: set[int] = set()
        for sequence in waiting:
            subject = sequence.request.view.subject
            most = max(1, part // tenants[subject.tenant])
            if len(chosen) < self._window and taken[subject] < most and taken[subject.tenant] < part:
                taken.update((subject, subject.tenant))
                chosen.add(sequence.handle)
        for sequence in waiting:
            if len(chosen) >= self._window:
                break
            chosen.add(sequence.handle)
        window = [sequence for sequence in waiting if sequence.handle in chosen]
        return window, [sequence for sequence in waiting if sequence.handle not in chosen]
