"""Device pages that waiting sequences hold for prompts which another group computes, in the order of admission."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import ClassQueues
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import Billing


class Reservations:
    """Grants device pages to waiting sequences, and takes them back.

    A reservation is an admission in advance: the policy's order decides which prompts get pages, each is charged when
    it gets them, and who gives them up is decided as for rows (`RowPreemption`). A prompt that loses its pages arrives
    on the host from then on, so nothing is computed again, and each loses them once at most.
    """

    def __init__(self, rows: RowSlots, queue: ClassQueues, memory: KvMemory, billing: Billing) -> None:
        """Read state that the core owns."""
        self._rows = rows
        self._queue = queue
        self._memory = memory
        self._billing = billing

    def grant(self, candidates: Iterable[Sequence], refused: Sequence | None, free_slots: int) -> None:
        """Give pages to prompts whose first pages have been offered, as far as there are rows and memory for them.

        `candidates` come in the order of admission; those from `refused` on, which lacks memory itself, get none. The
        pages of a prompt that gets none now arrive on the host.
        """
        loads = self._memory.loads
        if loads is None or not loads.host.peers.wants_places:
            return
        self._billing.settle()
        slots = free_slots - len(loads.reserved)
        for sequence in candidates:
            fetch = sequence.remote
            if slots <= 0 or sequence is refused:
                return
            if fetch is None or not fetch.wants_place:
                continue
            if fetch.pages_to_come + self._rows.running > self._memory.available_pages:
                return
            if loads.host.peers.open_place(fetch, self._rows.running):
                self._billing.reserve(sequence, fetch.pages_to_come * self._memory.cache.page_size)
                slots -= 1

    @property
    def holders(self) -> list[Sequence]:
        """The waiting sequences that have such pages, by arrival."""
        return [] if self._memory.loads is None else self._memory.loads.reserved

    def drop_tails(self) -> bool:
        """Take back the last pages of prompts that have arrived; their images are encoded here. False: none has any."""
        loads = self._memory.loads
        return loads is not None and loads.host.peers.drop_tails()

    def take(self, sequences: Iterable[Sequence]) -> bool:
        """Take back the pages of the first of `sequences`; return false if there are none to take now.

        Pages that are being written cannot be taken before they have arrived.
        """
        fetches = [each.remote for each in sequences if each.remote is not None and each.remote.holds_place]
        for fetch in fetches:
            if not fetch.is_transferring:
                fetch.leave_device()
                return True
        if fetches and not any(fetch.leaves_device for fetch in fetches):
            fetches[0].leaves_device = True
        return False
