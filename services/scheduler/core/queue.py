"""Sequences that wait for a row."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from services.scheduler.core.sequence import Sequence


class Policy(Protocol):
    """Decides in which order waiting sequences are offered a row."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Yield sequences in the order in which they should start.

        `waiting` comes in order of arrival; `match` says how many tokens of a sequence its own principal has cached.
        """
        ...


class WaitingQueue:
    """Sequences in order of arrival, behind those that were retracted; offered in the policy's order."""

    def __init__(self, policy: Policy) -> None:
        """Start empty."""
        self._policy = policy
        self._retracted: OrderedDict[int, Sequence] = OrderedDict()
        self._arrived: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        """Return how many sequences wait."""
        return len(self._retracted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, retracted ones first."""
        return iter([*self._retracted.values(), *self._arrived.values()])

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence."""
        self._arrived[sequence.handle] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others; the oldest of them stays first."""
        self._retracted[sequence.handle] = sequence
        if len(self._retracted) > 1:
            self._retracted = OrderedDict(sorted(self._retracted.items()))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        if self._retracted.pop(sequence.handle, None) is None:
            del self._arrived[sequence.handle]

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield those that may start, best first. The caller may remove what it was just given."""
        yield from [sequence for sequence in self._retracted.values() if sequence.may_start]
        ready = [sequence for sequence in self._arrived.values() if sequence.may_start]
        yield from self._policy.order(ready, match)
