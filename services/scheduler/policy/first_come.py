"""First come, first served."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.sequence import Sequence


class FirstComeFirstServed:
    """Keeps the order of arrival."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Return `waiting` unchanged."""
        return waiting
