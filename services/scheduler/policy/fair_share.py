"""The least served tenant first, in it the least served subject; among those near it, the longest cached prefix."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.types import Subject
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import VirtualCounters

K = TypeVar("K")


@dataclass(slots=True)
class _Waiting:
    """Sequences of one tenant: those of each subject by arrival, and its subjects by (counter, oldest handle)."""

    queues: dict[Subject, deque[Sequence]] = field(default_factory=dict)
    heap: list[tuple[float, int, Subject]] = field(default_factory=list)


class FairShare:
    """Orders by virtual token counters on two levels, with `slack_tokens` of freedom that longest-prefix order uses.

    The sequences of one subject start by arrival, so with one subject the order is first come, first served.

    A tenant may be preferred for a cached prefix only while its counter is at most `slack_tokens` above the lowest of
    all that wait, and so may a subject among those of its tenant. So on each level, the counters of two that keep
    waiting never lie further apart than the slack plus the larger of the longest prompt and the output weight × tokens
    of all running rows (divided by the smaller weight), and what they are given over any time differs by at most twice
    that: the paper's bound with the slack added to it.
    """

    def __init__(self, counters: VirtualCounters, slack_tokens: float = 512.0, window: int = 128) -> None:
        """Read `counters`, which the core keeps; match the next sequences of at most `window` subjects at a time."""
        assert slack_tokens >= 0
        assert window > 0
        self._counters = counters
        self._slack = slack_tokens
        self._window = window

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield one sequence after the other; what the caller charges for one counts for the choice of the next."""
        tenants = self._grouped(waiting)
        heap = [self._tenant_entry(name, tenant) for name, tenant in tenants.items()]
        heapq.heapify(heap)
        matched: dict[int, int] = {}

        def length(sequence: Sequence) -> int:
            if sequence.handle not in matched:
                matched[sequence.handle] = match(sequence)
            return matched[sequence.handle]

        while heap:
            nearest = self._take_nearest(heap, self._window)
            candidates: list[Sequence] = []
            taken: list[tuple[str, list[Subject]]] = []
            for _, _, name in nearest:
                tenant = tenants[name]
                most = max(1, self._window // len(nearest))
                subjects = [subject for _, _, subject in self._take_nearest(tenant.heap, most)]
                candidates += [tenant.queues[subject][0] for subject in subjects]
                taken.append((name, subjects))
            # `max` keeps the first of equals, and the nearest come by counter and arrival.
            chosen = max(candidates, key=length) if len(candidates) > 1 else candidates[0]
            subject = chosen.request.view.subject
            tenants[subject.tenant].queues[subject].popleft()
            yield chosen
            for name, subjects in taken:
                tenant = tenants[name]
                for each in subjects:
                    if tenant.queues[each]:
                        heapq.heappush(tenant.heap, self._subject_entry(each, tenant.queues[each]))
                if tenant.heap:
                    heapq.heappush(heap, self._tenant_entry(name, tenant))

    def _grouped(self, waiting: Iterable[Sequence]) -> dict[str, _Waiting]:
        tenants: dict[str, _Waiting] = {}
        for sequence in waiting:
            subject = sequence.request.view.subject
            tenants.setdefault(subject.tenant, _Waiting()).queues.setdefault(subject, deque()).append(sequence)
        for tenant in tenants.values():
            tenant.heap = [self._subject_entry(*item) for item in tenant.queues.items()]
            heapq.heapify(tenant.heap)
        return tenants

    def _take_nearest(self, heap: list[tuple[float, int, K]], most: int) -> list[tuple[float, int, K]]:
        """Take those out of the heap whose counters are near enough to the lowest, lowest first."""
        nearest = [heapq.heappop(heap)]
        limit = nearest[0][0] + self._slack
        while heap and heap[0][0] <= limit and len(nearest) < most:
            nearest.append(heapq.heappop(heap))
        return nearest

    def _subject_entry(self, subject: Subject, queue: deque[Sequence]) -> tuple[float, int, Subject]:
        return self._counters.of_subject(subject), queue[0].handle, subject

    def _tenant_entry(self, name: str, tenant: _Waiting) -> tuple[float, int, str]:
        # Ties are by arrival, that of the subject that would be first.
        return self._counters.of_tenant(name), tenant.heap[0][1], name
