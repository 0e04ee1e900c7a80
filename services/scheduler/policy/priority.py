"""Higher priority first."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.sequence import Sequence


class PriorityFirst:
    """Orders by the request's priority, then by arrival."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Return the highest priority first."""
        # A reversed sort is stable too: equal elements keep their order.
        return sorted(waiting, key=attrgetter("request.options.priority"), reverse=True)
