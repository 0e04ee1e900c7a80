"""Pages that stay in memory because other groups read them, and snapshots of the states after them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from services.scheduler.core.lent_pages import LentPages

if TYPE_CHECKING:
    from common.steps import PageIds
    from common.types import SnapshotSlot, TokenIds, View
    from services.scheduler.cache.state_snapshots import SnapshotEntry
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.memory import KvMemory


class Exports:
    """Owns the pins of leases, by the leases' names.

    Each pin covers a longer part of the same prefix. Earlier ones are kept, since the cache may have replaced pages by
    equal ones in between, and readers know the earlier pages.
    """

    def __init__(self, memory: KvMemory) -> None:
        """Start without pins."""
        # Changes when all pins are lost.
        self.generation = 0
        # As granted by the workers, and apart from the pins.
        self.lent = LentPages(memory.allocator)
        self._memory = memory
        self._pins: dict[bytes, list[PrefixLock]] = defaultdict(list)
        self._states: dict[bytes, SnapshotEntry] = {}

    def __len__(self) -> int:
        """Return the number of leases with pins or pages."""
        return len(self._pins)

    def pin(
        self, lease: bytes, view: View, token_ids: TokenIds, priority: int, session: str | None
    ) -> PrefixLock | None:
        """Pin the cached part of a prefix for a request of `session`; None if the view has none of it cached."""
        pin = self._memory.pin(view, token_ids, priority, session)
        if pin is not None:
            self._pins[lease].append(pin)
        return pin

    def lend_state(self, lease: bytes) -> SnapshotSlot | None:
        """Keep the snapshot after all pages of a lease's latest pin, once for a lease; return its slot, or None."""
        pins = self._pins.get(lease)
        entry = self._memory.try_lend_state(pins[-1]) if pins and lease not in self._states else None
        if entry is None:
            return None
        self._states[lease] = entry
        return entry.slot

    def keep(self, lease: bytes, pages: PageIds) -> None:
        """Hold pages that are not in the cache, once for a lease, and that a row has now."""
        self._pins.setdefault(lease, [])
        self._memory.hold(lease, pages)

    def release(self, lease: bytes) -> None:
        """Release a lease's pins, pages and snapshot, if it has any."""
        for pin in self._pins.pop(lease, ()):
            self._memory.unpin(pin)
        self._memory.let_go(lease)
        if lease in self._states:
            self._memory.take_back_state(self._states.pop(lease))

    def lose_all(self) -> None:
        """Drop all pins because their memory is gone."""
        self.generation += 1
        self.lent.forget_all()
        for lease in list(self._pins):
            self.release(lease)
