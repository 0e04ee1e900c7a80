"""Lets lookups in storage fill the host in turns: what one has brought is there until its request starts.

With recurrent layers, pages are of no use without the snapshot after them, and this is of none without them. If any
number of lookups read at once, each would evict a part of what others have read, and all requests would be computed.
So a lookup reads on only in a turn, which holds what it has brought. It gets one if the host has room for all that it
found beside the turns of others, and is never without room for all of it, so turns do not wait for each other.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from services.scheduler.cache.node import Node
    from services.scheduler.cache.state_snapshots import SnapshotEntry, StateSnapshots
    from services.scheduler.cache.tiers.host_pages import HostHold, HostPages
    from services.scheduler.cache.types import Scope


@dataclass(slots=True, eq=False, repr=False)
class Turn:
    """Room for `pages` pages and a snapshot, and what has been brought so far."""

    pages: int
    hold: HostHold | None = None
    snapshot: SnapshotEntry | None = None


class ReadTurns:
    """Owns the turns. Together they take at most half of the host's pages and slots, except for a single one."""

    def __init__(self, host: HostPages, snapshots: StateSnapshots) -> None:
        """Start without any, on the host with these pages and snapshots."""
        self._host = host
        self._snapshots = snapshots
        self._turns: dict[Turn, None] = {}

    def __len__(self) -> int:
        """Return the number of turns."""
        return len(self._turns)

    def has_room(self, pages: int) -> bool:
        """Whether one more turn, of so many pages, can begin; that of a single one is limited by the host alone.

        Of a turn that holds more than it is for, as nodes were joined, all that it holds counts.
        """
        if not self._turns:
            return True
        taken = sum(max(turn.pages, 0 if turn.hold is None else turn.hold.pages) for turn in self._turns)
        return (
            2 * (taken + pages) <= self._host.allocator.capacity
            and 2 * (len(self._turns) + 1) <= self._snapshots.capacity
        )

    def begin(self, pages: int) -> Turn:
        """Start a turn that holds nothing yet; `has_room` has allowed it."""
        turn = Turn(pages)
        self._turns[turn] = None
        return turn

    def hold(self, turn: Turn, end: Node | None) -> None:
        """Keep the path to `end` on the host, instead of the one before."""
        before, turn.hold = turn.hold, None if end is None else self._host.hold(end)
        if before is not None:
            self._host.release(before)

    def keep(self, turn: Turn, snapshot: SnapshotEntry) -> None:
        """Keep the snapshot that has arrived on the host."""
        assert turn.snapshot is None, "one arrives"
        turn.snapshot = snapshot
        self._snapshots.lend(snapshot)

    def end(self, turn: Turn) -> None:
        """End a turn, from which on all that it holds can be evicted."""
        del self._turns[turn]
        self.hold(turn, None)
        if turn.snapshot is not None:
            self._snapshots.give_back(turn.snapshot)

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        snapshots = [turn.snapshot for turn in self._turns if turn.snapshot is not None]
        return [] if all(entry.readers for entry in snapshots) else ["a snapshot of a turn can be evicted"]


class Waits(Protocol):
    """A lookup that waits for a turn. Its number says how many came before it."""

    @property
    def scope(self) -> Scope:
        """The view that it is for."""

    @property
    def number(self) -> int:
        """Sequential number."""

    @property
    def is_batch(self) -> bool:
        """Whether it is for a batch."""


W = TypeVar("W", bound=Waits)


class TurnOrder:
    """Whose turn is next: lookups are numbered as they begin, and the lowest place comes first.

    Those of a tenant, and in it those of a subject, count as begun after its last turn. So a flood of lookups, of
    whatever names, leaves the next turn to other tenants, and one of a single subject to others of its tenant.
    """

    def __init__(self) -> None:
        """Start without any turn."""
        # The number of the first lookup after the last turn of each tenant and subject that has more lookups.
        self._last: dict[Scope, int] = {}

    def __len__(self) -> int:
        """Return the number of tenants and subjects that are remembered."""
        return len(self._last)

    def by_place(self, waiting: Iterable[W]) -> Iterator[W]:
        """Yield lookups by their places, which are those after the turns that are noted meanwhile.

        Each is placed once when it comes first, and again if a turn has been noted for its tenant: a few times, however
        many turns begin.
        """
        heap = [(self.place(each), each.number, each) for each in waiting]
        heapq.heapify(heap)
        while heap:
            place, number, first = heap[0]
            later = self.place(first)
            if later > place:
                heapq.heapreplace(heap, (later, number, first))
            else:
                heapq.heappop(heap)
                yield first

    def place(self, waiting: Waits) -> tuple[bool, int, int]:
        """Return the place of a lookup; those of batches come last."""
        number, last = waiting.number, self._last
        tenant, subject = waiting.scope[:1], waiting.scope[:2]
        return waiting.is_batch, max(number, last.get(tenant, 0)), max(number, last.get(subject, 0))

    def note(self, scope: Scope, following: int) -> None:
        """Note that a view's turn begins before the lookup `following`."""
        self._last[scope[:1]] = self._last[scope[:2]] = following

    def forget_others(self, present: Iterable[Scope]) -> None:
        """Forget the turns of tenants and subjects that have none of the `present` views."""
        kept = {owner for view in present for owner in (view[:1], view[:2])}
        self._last = {owner: last for owner, last in self._last.items() if owner in kept}
