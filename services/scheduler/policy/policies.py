"""Policies: the order of the waiting queue."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeVar, assert_never

from services.scheduler.core.queue import QueueOrder
from services.scheduler.core.shares import ShareConfig, VirtualCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.settings import QueueSettings
    from services.scheduler.core.queue import QueuePolicy, Waiting, WaitingLine
    from services.scheduler.core.sequence import Sequence

K = TypeVar("K")

PolicyName = Literal["fcfs", "lpm", "priority", "fair"]


def make_order(settings: QueueSettings) -> QueueOrder:
    """Return the policy of `settings`, with counters of its own if it needs any."""
    counters = VirtualCounters(ShareConfig()) if settings.policy == "fair" else None
    return QueueOrder(make_policy(settings.policy, counters), counters)


def make_policy(name: PolicyName, counters: VirtualCounters | None = None, slack_tokens: float = 512.0) -> QueuePolicy:
    """Return the policy of a `QueueSettings.policy` name. `fair` reads `counters`, which the core updates."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch()
        case "priority":
            return PriorityFirst()
        case "fair":
            assert counters is not None, "fair shares are by counters"
            return FairShare(counters, slack_tokens)
        case _:
            assert_never(name)


class FirstComeFirstServed:
    """Keeps the order of arrival."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Return `waiting` unchanged."""
        return waiting


class PriorityFirst:
    """Orders by the request's priority, then by arrival."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Return the highest priority first."""
        # A reversed sort is stable too: equal elements keep their order.
        return sorted(waiting, key=attrgetter("request.options.priority"), reverse=True)


class LongestPrefixMatch:
    """Starts sequences that need the least prefill first, while the prefixes they share are still cached.

    Work per round is bounded: only a window of `window` sequences is matched, the others follow by arrival. The window
    is divided equally among the waiting tenants, and each part among the tenant's subjects; unused places go to the
    oldest sequences. So a flood by one subject does not displace the others. No sequence starves: those that arrived
    more than `patience_s` before the newest one go first, by arrival.
    """

    def __init__(self, window: int = 128, patience_s: float = 30.0) -> None:
        """Match at most `window` sequences; only those arriving within `patience_s` after one can overtake it."""
        assert window > 0
        assert patience_s >= 0
        self._window = window
        self._patience_s = patience_s

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield overdue sequences by arrival, then the window by match and arrival, then the others by arrival."""
        by_arrival = list(waiting)
        if not by_arrival:
            return
        # Relative to the newest arrival rather than to now: without new arrivals no sequence is overtaken indefinitely.
        deadline = by_arrival[-1].arrived_at - self._patience_s
        impatient = next(index for index, sequence in enumerate(by_arrival) if sequence.arrived_at >= deadline)
        yield from islice(by_arrival, impatient)
        window, others = self._divide(by_arrival[impatient:])
        yield from sorted(window, key=match, reverse=True)
        yield from others

    def _divide(self, waiting: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the window and the others, both by arrival."""
        if len(waiting) <= self._window:
            return waiting, []
        subjects = {sequence.request.view.subject for sequence in waiting}
        tenants = Counter(subject.tenant for subject in subjects)
        part = max(1, self._window // len(tenants))
        taken: Counter[object] = Counter()
        chosen: set[int] = set()
        for sequence in waiting:
            subject = sequence.request.view.subject
            most = max(1, part // tenants[subject.tenant])
            if len(chosen) < self._window and taken[subject] < most and taken[subject.tenant] < part:
                taken.update((subject, subject.tenant))
                chosen.add(sequence.handle)
        for sequence in waiting:
            if len(chosen) >= self._window:
                break
            chosen.add(sequence.handle)
        window = [sequence for sequence in waiting if sequence.handle in chosen]
        return window, [sequence for sequence in waiting if sequence.handle not in chosen]


@dataclass(slots=True)
class _Tenant:
    """A tenant's waiting subjects in a heap of (counter, handle of the next sequence, name)."""

    lines: dict[str, WaitingLine]
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

    def _tenant(self, lines: dict[str, WaitingLine]) -> _Tenant:
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
