"""Least served tenant first, and within it the least served subject; near them, the longest cached prefix."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.scheduler.core.queue import Line, Waiting
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import VirtualCounters

K = TypeVar("K")


@dataclass(slots=True)
class _Tenant:
    """A tenant's waiting subjects in a heap of (counter, handle of the next sequence, name)."""

    lines: dict[str, Line]
    heap: list[tuple[float, int, str]] = field(default_factory=list)
    # A line is copied when its first sequence is chosen, as the caller may or may not remove it.
    _left: dict[str, deque[Sequence]] = field(default_factory=dict)

    def next_of(self, subject: str) -> Sequence | None:
        """Return the subject's next sequence that may start."""
        if subject not in self._left:
            first = next(iter(self.lines[subject].values()))
            if first.may_start:
                return first
            self._copy(subject)
        left = self._left[subject]
        return left[0] if left else None

    def next_few(self, subject: str, most: int) -> list[Sequence]:
        """Return up to `most` of the subject's next sequences that may start."""
        if subject not in self._left:
            self._copy(subject)
        return list(islice(self._left[subject], most))

    def take(self, sequence: Sequence) -> None:
        """Remove one of the sequences that `next_few` has returned."""
        self._left[sequence.request.view.subject.name].remove(sequence)

    def _copy(self, subject: str) -> None:
        self._left[subject] = deque(sequence for sequence in self.lines[subject].values() if sequence.may_start)


class FairShare:
    """Orders by virtual token counters on two levels; within `slack_tokens` of the lowest, by longest cached prefix.

    A subject that waits alone is served by arrival; beside others, its own sequences start by longest prefix, too.

    A tenant may be preferred for a cached prefix only while its counter is at most `slack_tokens` above the lowest of
    all waiting tenants, and likewise a subject among those of its tenant. So on each level, the counters of two parties
    that wait continuously never lie further apart than the slack plus the larger of the longest prompt and the output
    weight × tokens of all running sequences (divided by the smaller weight), and the service given to them over any
    time differs by at most twice that: the paper's bound plus the slack.
    """

    def __init__(self, counters: VirtualCounters, slack_tokens: float = 512.0, window: int = 128) -> None:
        """Read `counters`, which the core updates; match at most `window` sequences at a time."""
        assert slack_tokens >= 0
        assert window > 0
        self._counters = counters
        self._slack = slack_tokens
        self._window = window

    def order(self, waiting: Waiting, match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield sequences one by one; charges that the caller makes for one affect the choice of the next."""
        if sum(map(len, waiting.lines.values())) == 1:
            yield from waiting
            return
        tenants = {name: self._tenant(lines) for name, lines in waiting.lines.items()}
        heap = [self._tenant_entry(name, tenant) for name, tenant in tenants.items() if tenant.heap]
        heapq.heapify(heap)
        matched: dict[int, int] = {}

        def length(sequence: Sequence) -> int:
            if sequence.handle not in matched:
                matched[sequence.handle] = match(sequence)
            return matched[sequence.handle]

        while heap:
            nearest = self._take_nearest(heap, self._window)
            most = max(1, self._window // len(nearest))
            taken = [(name, self._take_nearest(tenants[name].heap, most)) for _, _, name in nearest]
            subjects = [(name, subject) for name, entries in taken for _, _, subject in entries]
            candidates = [
                sequence
                for name, entries in taken
                for _, _, subject in entries
                for sequence in tenants[name].next_few(subject, max(1, most // len(entries)))
            ]
            # `max` returns the first of equals, and the nearest are ordered by counter and arrival.
            chosen = max(candidates, key=length) if len(candidates) > 1 else candidates[0]
            tenants[chosen.request.view.tenant].take(chosen)
            yield chosen
            for name, subject in subjects:
                self._put_back(tenants[name], subject)
            for _, _, name in nearest:
                if tenants[name].heap:
                    heapq.heappush(heap, self._tenant_entry(name, tenants[name]))

    def _tenant(self, lines: dict[str, Line]) -> _Tenant:
        tenant = _Tenant(dict(lines))
        for subject in lines:
            self._put_back(tenant, subject)
        return tenant

    def _put_back(self, tenant: _Tenant, subject: str) -> None:
        following = tenant.next_of(subject)
        if following is not None:
            counter = self._counters.of_subject(following.request.view.subject)
            heapq.heappush(tenant.heap, (counter, following.handle, subject))

    def _take_nearest(self, heap: list[tuple[float, int, K]], most: int) -> list[tuple[float, int, K]]:
        """Pop the entries whose counters are within the slack of the lowest, lowest first."""
        nearest = [heapq.heappop(heap)]
        limit = nearest[0][0] + self._slack
        while heap and heap[0][0] <= limit and len(nearest) < most:
            nearest.append(heapq.heappop(heap))
        return nearest

    def _tenant_entry(self, name: str, tenant: _Tenant) -> tuple[float, int, str]:
        # Ties are broken by arrival of the sequence that would be first.
        return self._counters.of_tenant(name), tenant.heap[0][1], name
