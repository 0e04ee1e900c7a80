"""Page grants of a plan."""

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
    """Appends pages to rows' page tables, and collects the grants for the workers."""

    def __init__(self, rows: RowTable, memory: KvMemory) -> None:
        """Start without grants; `memory` maps pages to their pages in a sliding-window pool."""
        self._rows = rows
        self._memory = memory
        self._given: list[PageGrants] = []

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64], pages: PageIds) -> None:
        """Give each of `rows` the next counts[i] > 0 of `pages`; a row may occur only once."""
        self._rows.grant_pages(rows, counts, pages)
        owners = rows if len(rows) == len(pages) else np.repeat(rows, counts)
        self._given.append(PageGrants(owners.astype(np.int32), pages, self._memory.window_pages_of(pages)))

    def grants(self) -> PageGrants:
        """Return all grants, in order."""
        if len(self._given) <= 1:
            return self._given[0] if self._given else PageGrants()
        return PageGrants(
            np.concatenate([grants.rows for grants in self._given]),
            np.concatenate([grants.pages for grants in self._given]),
            np.concatenate([grants.window_pages for grants in self._given]),
        )
