"""A record of the pages that other groups may read, by which the owner's promise to keep them is checked."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.cache.pages import PageAllocator


class LentPages:
    """Knows which pages are lent, from before the workers grant them until all workers have confirmed their return.

    It holds no references, so that it also notices pages whose references were dropped too early.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        """Check pages of this allocator."""
        self._allocator = allocator
        # Pages that were lent together, with their numbers of allocations by then. The lease checked last comes last.
        self._leases: dict[bytes, list[tuple[PageIds, NDArray[np.int64]]]] = {}

    def __len__(self) -> int:
        """Return the number of leases with lent pages."""
        return len(self._leases)

    def lend(self, lease: bytes, pages: PageIds) -> None:
        """Note that pages may be read by the name of a lease."""
        if len(pages):
            self._leases.setdefault(lease, []).append((pages, self._allocator.allocations[pages]))

    def take_back(self, lease: bytes) -> None:
        """Note that the pages of a lease are no longer read."""
        self._leases.pop(lease, None)

    def forget_all(self) -> None:
        """Note that the lent memory is gone."""
        self._leases.clear()

    def faults(self, leases: int) -> list[str]:
        """Describe the lent pages that are free or were allocated again, of the `leases` checked longest ago."""
        found = []
        for lease in list(islice(self._leases, leases)):
            lent = self._leases[lease] = self._leases.pop(lease)
            for pages, allocations in lent:
                is_free = self._allocator.counts[pages] == 0
                is_granted = self._allocator.allocations[pages] != allocations
                for name, wrong in (("is free", is_free), ("was granted again", is_granted)):
                    found += [f"page {page} of lease {lease.hex()} {name}" for page in pages[wrong].tolist()]
        return found
