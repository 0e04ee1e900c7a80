"""Longest cached prefix first."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from services.scheduler.core.sequence import Sequence


class LongestPrefixMatch:
    """Starts those first that need the least prefill, while what they share is still cached.

    Work per round is bounded: only the `window` oldest are matched, the others follow by arrival. Nobody starves:
    those who arrived more than `patience_s` before the newest one go first, by arrival.
    """

    def __init__(self, window: int = 128, patience_s: float = 30.0) -> None:
        """Match at most `window` sequences; let a sequence be overtaken by those that come within `patience_s`."""
        assert window > 0
        assert patience_s >= 0
        self._window = window
        self._patience_s = patience_s

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield the impatient, then the window by match and arrival, then the others by arrival."""
        by_arrival = list(waiting)
        if not by_arrival:
            return
        # Compared with the newest arrival and not with now: without newcomers nobody is overtaken for ever.
        deadline = by_arrival[-1].arrived_at - self._patience_s
        impatient = next(index for index, sequence in enumerate(by_arrival) if sequence.arrived_at >= deadline)
        yield from islice(by_arrival, impatient)
        window_end = impatient + self._window
        yield from sorted(by_arrival[impatient:window_end], key=match, reverse=True)
        yield from islice(by_arrival, window_end, None)
