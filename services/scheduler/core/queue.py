"""Sequences that wait for a row."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.types import Subject
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import VirtualCounters

K = TypeVar("K")


class Policy(Protocol):
    """Decides in which order waiting sequences are offered a row."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Yield sequences in the order in which they should start.

        `waiting` comes in order of arrival; `match` says how many tokens of a sequence its own principal has cached.
        """
        ...


class WaitingQueue:
    """Sequences in order of arrival, behind those that were retracted; offered in the policy's order."""

    def __init__(
        self, policy: Policy, counters: VirtualCounters | None = None, *, retracted_first: bool = True
    ) -> None:
        """Start empty; `counters` are told who waits.

        With `retracted_first`, who was retracted starts before all others, whatever the policy says.
        """
        self._retracted_first = retracted_first
        self._policy = policy
        self._counters = counters
        self._by_subject: Counter[Subject] = Counter()
        self._by_priority: Counter[int] = Counter()
        self._retracted: OrderedDict[int, Sequence] = OrderedDict()
        self._arrived: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        """Return how many sequences wait."""
        return len(self._retracted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, retracted ones first."""
        return iter([*self._retracted.values(), *self._arrived.values()])

    @property
    def highest_priority(self) -> int | None:
        """The highest priority of all that wait."""
        return max(self._by_priority, default=None)

    def waiting_tokens(self, most: int) -> int:
        """Return how many tokens of prompts wait, those in the cache included; counts no further than `most`."""
        total = 0
        for sequence in chain(self._retracted.values(), self._arrived.values()):
            total += len(sequence.token_ids)
            if total >= most:
                return most
        return total

    def waiting_of(self, subject: Subject) -> int:
        """Return how many sequences of a subject wait."""
        return self._by_subject[subject]

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence."""
        self._arrived[sequence.handle] = sequence
        self._enter(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others; the oldest of them stays first."""
        self._retracted[sequence.handle] = sequence
        self._enter(sequence)
        if len(self._retracted) > 1:
            self._retracted = OrderedDict(sorted(self._retracted.items()))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        if self._retracted.pop(sequence.handle, None) is None:
            del self._arrived[sequence.handle]
        subject = sequence.request.view.subject
        _take_one(self._by_subject, subject)
        _take_one(self._by_priority, sequence.request.priority)
        if self._counters is not None:
            self._counters.exit(subject)

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield those that may start, best first. The caller may remove what it was just given."""
        retracted = [sequence for sequence in self._retracted.values() if sequence.may_start]
        ready = [sequence for sequence in self._arrived.values() if sequence.may_start]
        if self._retracted_first:
            yield from retracted
            yield from self._policy.order(ready, match)
        else:
            yield from self._policy.order([*retracted, *ready], match)

    def _enter(self, sequence: Sequence) -> None:
        subject = sequence.request.view.subject
        self._by_subject[subject] += 1
        self._by_priority[sequence.request.priority] += 1
        if self._counters is not None:
            self._counters.enter(subject)


def _take_one(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
