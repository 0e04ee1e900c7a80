"""Who has had how much: virtual token counters of subjects (Sheng et al., Fairness in Serving LLMs, OSDI 2024)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.types import Subject

# A heap is rebuilt when it has so many dead entries beside twice the live ones.
_SPARE_ENTRIES = 32

# Whom a counter is for: (tenant, user), or (tenant,) where a tenant's users share one.
ShareKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """How service is counted. A tenant's `weight` says how much of it counts as one token."""

    # A generated token takes a pass of its own, a prompt's shares one with many: the paper's ratio.
    output_weight: float = 2.0
    # Tenants that are not named here weigh 1.
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    # Where whoever holds an API key can invent users.
    tenant_counts_as_one: bool = False
    # Counters of idle subjects kept at most: 100,000 are about 45 MB.
    remembered: int = 100_000


@dataclass(slots=True, eq=False, repr=False)
class _Share:
    """One counter. `entry` numbers its valid place in whichever heap it is in: that of who waits, or of who is idle."""

    key: ShareKey
    counter: float
    waiting: int = 0
    entry: int = 0


class VirtualCounters:
    """Counts service by subject, in weighted tokens.

    A subject whose first request comes to wait is lifted to the lowest counter among those that wait: whoever was
    idle has saved up nothing. What an idle subject has had beyond that is remembered until the others have caught up.
    All calls take O(log n) amortised for n subjects that wait or are remembered.
    """

    def __init__(self, config: ShareConfig) -> None:
        """Start with nobody."""
        self._config = config
        # Nobody who comes to wait starts below it; it never falls.
        self._floor = 0.0
        self._shares: dict[ShareKey, _Share] = {}
        self._waiting: list[tuple[float, int, _Share]] = []
        self._idle: list[tuple[float, int, _Share]] = []
        self._waiting_shares = 0
        self._numbers = count(1)

    def __len__(self) -> int:
        """Return how many counters are kept."""
        return len(self._shares)

    def key(self, subject: Subject) -> ShareKey:
        """Return whose counter a subject's service goes to."""
        if self._config.tenant_counts_as_one:
            return (subject.tenant,)
        return (subject.tenant, subject.name)

    def counter(self, key: ShareKey) -> float:
        """Return what counts as received, in weighted tokens."""
        share = self._shares.get(key)
        return self._floor if share is None else share.counter

    def enter(self, subject: Subject) -> None:
        """A request of the subject begins to wait."""
        share = self._share(self.key(subject))
        if not share.waiting:
            self._raise_floor()
            share.counter = max(share.counter, self._floor)
            self._waiting_shares += 1
            self._push(self._waiting, share)
        share.waiting += 1

    def exit(self, subject: Subject) -> None:
        """A request of the subject waits no longer, for whatever reason."""
        share = self._shares[self.key(subject)]
        share.waiting -= 1
        if share.waiting:
            return
        self._waiting_shares -= 1
        if not self._waiting_shares:
            # Nobody lacked what the last one got: there is nothing to make up for.
            self._floor = max(self._floor, share.counter)
        self._push(self._idle, share)
        self._raise_floor()
        self._forget()

    def charge(self, subject: Subject, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count service: prompt tokens that had to be computed (negative: that were not, after all), and output."""
        weight = self._config.weights.get(subject.tenant, 1.0)
        share = self._share(self.key(subject))
        share.counter += (prompt_tokens + self._config.output_weight * output_tokens) / weight
        if not share.waiting:
            self._push(self._idle, share)
            self._forget()
        elif prompt_tokens < 0:
            # The heap is right about counters that have grown since, but not about one that has fallen.
            self._push(self._waiting, share)

    def _share(self, key: ShareKey) -> _Share:
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = _Share(key, self._floor)
        return share

    def _push(self, heap: list[tuple[float, int, _Share]], share: _Share) -> None:
        share.entry = next(self._numbers)
        heapq.heappush(heap, (share.counter, share.entry, share))
        if len(heap) > 2 * len(self._shares) + _SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[1] == entry[2].entry]
            heapq.heapify(heap)

    def _raise_floor(self) -> None:
        lowest = next(self._lowest_waiting(), None)
        if lowest is not None:
            self._floor = max(self._floor, lowest)

    def _lowest_waiting(self) -> Iterator[float]:
        heap = self._waiting
        while heap:
            counter, entry, share = heap[0]
            if entry != share.entry or not share.waiting:
                heapq.heappop(heap)
            elif counter < share.counter:
                heapq.heapreplace(heap, (share.counter, entry, share))
            else:
                yield counter

    def _forget(self) -> None:
        """Drop idle counters that a return would lift anyway, and the lowest ones when there are too many."""
        heap = self._idle
        while heap:
            counter, entry, share = heap[0]
            if entry == share.entry and not share.waiting:
                idle = len(self._shares) - self._waiting_shares
                if counter > self._floor and idle <= self._config.remembered:
                    return
                del self._shares[share.key]
            heapq.heappop(heap)
