"""The pages that a plan gives to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import PageGrants

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.rows import RowTable


class Granting:
    """Puts pages into rows' page tables, and gathers for the workers which."""

    def __init__(self, rows: RowTable, memory: KvMemory) -> None:
        """Begin with nothing granted; `memory` knows which pages of a window pool belong to others."""
        self._rows = rows
        self._memory = memory
        self._given: list[PageGrants] = []

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64], pages: PageIds) -> None:
        """Give each of `rows` the next of `pages`: counts[i] > 0 of them to rows[i], which is named once."""
        self._rows.grant_pages(rows, counts, pages)
        owners = rows if len(rows) == len(pages) else np.repeat(rows, counts)
        self._given.append(PageGrants(owners.astype(np.int32), pages, self._memory.window_pages_of(pages)))

    def grants(self) -> PageGrants:
        """Return all that was given, in order."""
        if len(self._given) <= 1:
            return self._given[0] if self._given else PageGrants()
        return PageGrants(
            np.concatenate([grants.rows for grants in self._given]),
            np.concatenate([grants.pages for grants in self._given]),
            np.concatenate([grants.window_pages for grants in self._given]),
        )
