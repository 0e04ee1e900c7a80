"""Which adapters (LoRA) are in the workers' slots: least recently used ones make room, pinned ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.steps import AdapterLoad
from common.types import AdapterSlot

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(slots=True)
class _Resident:
    """An adapter in a slot; `tenant` is that of the row for which it was loaded."""

    slot: AdapterSlot
    tenant: str
    rows: int = 0


class AdapterSlots:
    """Assigns slots to adapters, by their digests, when rows that use them start.

    If a sequence finds no slot, the adapter that has been in use for longest gets no further rows, so that its slot
    becomes free: steady use of a few adapters does not keep all others waiting.
    """

    def __init__(self, count: int, tenant_share: float = 1.0) -> None:
        """Start with `count` empty slots; rows of one tenant use at most this share of them, but one."""
        # Adapters that stay in their slots.
        self.pinned: Collection[str] = frozenset()
        self._count = count
        self._most_of_tenant = max(int(count * tenant_share), 1)
        # Least recently used first.
        self._residents: dict[str, _Resident] = {}
        self._free = [AdapterSlot(slot) for slot in range(count - 1, -1, -1)]
        self._loads: list[AdapterLoad] = []
        self._draining: str | None = None
        self._was_refused = False

    @property
    def count(self) -> int:
        """Number of slots."""
        return self._count

    def rows_of(self, digest: str) -> int | None:
        """Return the number of rows that use an adapter; None if it has no slot."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.rows

    def begin_plan(self) -> None:
        """Begin to admit sequences for a plan."""
        if not self._was_refused:
            self._draining = None
        self._was_refused = False

    def may_take(self, digest: str, tenant: str) -> bool:
        """Return whether a row of `tenant` that uses an adapter may start now."""
        resident = self._residents.get(digest)
        if resident is not None and (resident.rows or self._within_share(tenant)):
            if digest != self._draining:
                return True
        elif resident is None and self._within_share(tenant):
            if self._free or self._victim() is not None:
                return True
            self._was_refused = True
            if self._draining not in self._residents:
                self._draining = self._longest_used()
        return False

    def take(self, digest: str, tenant: str) -> AdapterSlot:
        """Count a row that starts, after `may_take`; return its slot, which the next plan fills if need be."""
        resident = self._residents.pop(digest, None)
        if resident is None:
            resident = _Resident(self._take_slot(), tenant)
            self._loads.append(AdapterLoad(resident.slot, digest))
        elif not resident.rows:
            resident.tenant = tenant
        resident.rows += 1
        self._residents[digest] = resident
        return resident.slot

    def give_back(self, digest: str) -> None:
        """Count a row that has ended."""
        self._residents[digest].rows -= 1

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the loads for a plan, and clear them."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def drop(self, digest: str) -> None:
        """Free the slot of an adapter that no row uses and none will."""
        resident = self._residents.pop(digest, None)
        if resident is not None:
            assert not resident.rows, "rows use it"
            self._free.append(resident.slot)

    def forget_all(self) -> None:
        """Empty all slots, as the workers were lost; no row may run."""
        self._free += [resident.slot for resident in self._residents.values()]
        self._residents.clear()
        self._loads = []

    def _within_share(self, tenant: str) -> bool:
        used = sum(bool(each.rows) and each.tenant == tenant for each in self._residents.values())
        return used < self._most_of_tenant

    def _take_slot(self) -> AdapterSlot:
        if self._free:
            return self._free.pop()
        victim = self._victim()
        assert victim is not None, "the caller has asked"
        if victim == self._draining:
            self._draining = None
        slot = self._residents.pop(victim).slot
        # What was never sent must not replace what follows.
        self._loads = [load for load in self._loads if load.slot != slot]
        return slot

    def _victim(self) -> str | None:
        idle = (digest for digest, each in self._residents.items() if not each.rows)
        return next((digest for digest in idle if digest not in self.pinned), None)

    def _longest_used(self) -> str | None:
        return next((digest for digest in self._residents if digest not in self.pinned), None)
