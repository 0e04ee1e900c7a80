"""Sequences that wait for a row."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from common.errors import QueueFullError
from services.scheduler.core.sequence import Census

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.limits import Limits
    from common.types import ScheduleRequest, Subject
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import VirtualCounters

# Retry hint for refused clients: about the time until a full queue has room again.
RETRY_AFTER_MS = 1000


# The waiting sequences of one subject by handle, in the order in which they should start.
WaitingLine = dict[int, "Sequence"]


class Waiting(Protocol):
    """Waiting sequences; iteration yields those that may start, by arrival."""

    @property
    def lines(self) -> dict[str, dict[str, WaitingLine]]:
        """All waiting sequences by tenant and subject name, including those that may not start yet."""

    def __iter__(self) -> Iterator[Sequence]: ...


class QueuePolicy(Protocol):
    """Decides the order in which waiting sequences are offered a row."""

    def order(self, waiting: Waiting, match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        """Yield sequences in the order in which they should start.

        `waiting` is ordered by arrival and grouped by subject; `match` returns how many tokens of a sequence are cached
        in its own view.
        """
        ...


class WaitingQueue:
    """Sequences of one class in order of arrival, after those that were retracted; offered in the policy's order."""

    def __init__(
        self, policy: QueuePolicy, counters: VirtualCounters | None = None, *, retracted_first: bool = True
    ) -> None:
        """Start empty; `counters` are notified of arrivals and departures.

        With `retracted_first`, retracted sequences start before all others, regardless of the policy.
        """
        self._retracted_first = retracted_first
        self._policy = policy
        self._counters = counters
        # Counts of the waiting sequences, and the tokens of KV that they are expected to need.
        self.census = Census()
        self.expected_tokens = 0
        self._by_priority: Counter[int] = Counter()
        self._lines: dict[str, dict[str, WaitingLine]] = {}
        self._retracted: OrderedDict[int, Sequence] = OrderedDict()
        self._arrived: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._retracted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, retracted ones first."""
        return iter([*self._retracted.values(), *self._arrived.values()])

    @property
    def highest_priority(self) -> int | None:
        """The highest priority of all waiting sequences; None if none waits."""
        return max(self._by_priority, default=None)

    def waiting_tokens(self, most: int) -> int:
        """Return the number of waiting prompt tokens, cached ones included; stops counting at `most`."""
        total = 0
        for sequence in chain(self._retracted.values(), self._arrived.values()):
            total += len(sequence.token_ids)
            if total >= most:
                return most
        return total

    def check_room(self, subject: Subject, sequences: int, most: int, limits: Limits) -> None:
        """Check that a subject may add `sequences` to a queue with `most` places.

        Without a configured bound, a tenant may have up to three times as many waiting as places are left, and a
        subject as many as its tenant may still add: a dynamic threshold (Choudhury and Hahne, 1998). A tenant or
        subject alone can thus use most of the queue, and a flood by one leaves room for the others. One that has
        nothing waiting is admitted while there is room.

        Raises:
            QueueFullError: the server's, the tenant's or the subject's bound is reached; the message says which.
        """
        left = most - len(self) - sequences
        if left < 0:
            raise _full(f"the queue of this server is full, with {len(self)} waiting requests")
        tenant, own = self.census.tenants[subject.tenant], self.census.of(subject)
        tenant_limit, own_limit = limits.of(subject.tenant).waiting, limits.of_subject(subject).waiting
        tenant_left = (3 * left if tenant_limit is None else tenant_limit) - tenant - sequences
        if tenant_left < 0 and (tenant or tenant_limit is not None):
            raise _full(self._whose(tenant, "organization", tenant_limit))
        own_left = (tenant_left if own_limit is None else own_limit) - own - sequences
        if own_left < 0 and (own or own_limit is not None):
            raise _full(self._whose(own, "user", own_limit))

    def _whose(self, waiting: int, whose: str, limit: int | None) -> str:
        bound = f"of which {limit} may" if limit is not None else f"which is its limit while {len(self)} wait in all"
        return f"{waiting} requests of this {whose} are waiting, {bound}"

    def add(self, sequence: Sequence) -> None:
        self._arrived[sequence.handle] = sequence
        if self._counters is not None:
            self._counters.note_throttled(sequence.request.view.subject, sequence.request.options)
        self._enter(sequence)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Put retracted sequences before all others; retracted ones stay in order of arrival."""
        changed = set()
        for sequence in sequences:
            self._retracted[sequence.handle] = sequence
            self._enter(sequence)
            changed.add(sequence.request.view.subject)
        if len(self._retracted) > 1:
            self._retracted = OrderedDict(sorted(self._retracted.items()))
        for subject in changed:
            line = self._lines[subject.tenant][subject.name]
            if len(line) > 1:
                by_start = sorted(line.items(), key=lambda item: (item[0] not in self._retracted, item[0]))
                self._lines[subject.tenant][subject.name] = dict(by_start)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        if self._retracted.pop(sequence.handle, None) is None:
            del self._arrived[sequence.handle]
        subject = sequence.request.view.subject
        self.expected_tokens -= sequence.expected_tokens
        self.census.remove(subject)
        lines = self._lines[subject.tenant]
        del lines[subject.name][sequence.handle]
        if not lines[subject.name]:
            del lines[subject.name]
        if not lines:
            del self._lines[subject.tenant]
        priority = sequence.request.options.priority
        self._by_priority[priority] -= 1
        if not self._by_priority[priority]:
            del self._by_priority[priority]
        if self._counters is not None:
            self._counters.exit(subject)

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield the sequences that may start, best first. The caller may remove the sequence just yielded."""
        return self._offer(self._lines, self._retracted, self._arrived, match)

    def ordered(self, sequences: Iterable[Sequence], match: Callable[[Sequence], int]) -> list[Sequence]:
        """Return some of the waiting sequences in the order in which they would start, those last that may not yet."""
        some = sorted(sequences, key=lambda each: (each.handle not in self._retracted, each.handle))
        lines: dict[str, dict[str, WaitingLine]] = {}
        for each in some:
            subject = each.request.view.subject
            lines.setdefault(subject.tenant, {}).setdefault(subject.name, {})[each.handle] = each
        retracted = OrderedDict((each.handle, each) for each in some if each.handle in self._retracted)
        arrived = OrderedDict((each.handle, each) for each in some if each.handle not in self._retracted)
        order = list(self._offer(lines, retracted, arrived, match))
        return order + [each for each in some if not each.may_start]

    def _offer(
        self,
        lines: dict[str, dict[str, WaitingLine]],
        retracted: OrderedDict[int, Sequence],
        arrived: OrderedDict[int, Sequence],
        match: Callable[[Sequence], int],
    ) -> Iterator[Sequence]:
        if not self._retracted_first:
            yield from self._policy.order(_Waiting(lines, (retracted, arrived)), match)
            return
        yield from [sequence for sequence in retracted.values() if sequence.may_start]
        yield from self._policy.order(_Waiting(lines, (arrived,)), match)

    def _enter(self, sequence: Sequence) -> None:
        subject = sequence.request.view.subject
        self.expected_tokens += sequence.expected_tokens
        self.census.add(subject)
        self._lines.setdefault(subject.tenant, {}).setdefault(subject.name, {})[sequence.handle] = sequence
        self._by_priority[sequence.request.options.priority] += 1
        if self._counters is not None:
            self._counters.enter(subject)


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """A policy, and the counters that it reads, if any; they are charged for the sequences that it orders."""

    policy: QueuePolicy
    counters: VirtualCounters | None = None
    # The order of batches' sequences among each other, with counters of its own; None: the same.
    batches: QueueOrder | None = None


class ClassQueues:
    """The waiting sequences of both classes: interactive ones, and those of batches.

    While an interactive sequence waits or runs, only these are offered rows, regardless of priorities, and the planner
    takes the rows of batches back. Otherwise the batches' sequences are offered rows, in an order of their own, unless
    the planner holds them (`batch_class.py`).
    """

    def __init__(
        self, rows: RowSlots, interactive: QueueOrder, batches: QueueOrder, *, retracted_first: bool = True
    ) -> None:
        """Start empty; `rows` say whether an interactive sequence runs."""
        self._rows = rows
        self._interactive = WaitingQueue(interactive.policy, interactive.counters, retracted_first=retracted_first)
        self._batches = WaitingQueue(batches.policy, batches.counters, retracted_first=retracted_first)
        # Whether batches are offered no rows for now, although no interactive sequence waits or runs.
        self.holds_batches = False

    @property
    def must_batches_yield(self) -> bool:
        """Whether an interactive sequence waits or runs."""
        return bool(len(self._interactive)) or self._rows.running > self._rows.batch_rows

    @property
    def served(self) -> WaitingQueue:
        """The queue of the class that is offered rows."""
        return self._interactive if self.must_batches_yield or self.holds_batches else self._batches

    @property
    def batch_sequences(self) -> int:
        """Number of waiting sequences of batches."""
        return len(self._batches)

    def __len__(self) -> int:
        """Return the number of waiting sequences of both classes."""
        return len(self._interactive) + len(self._batches)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, interactive sequences first."""
        return chain(iter(self._interactive), iter(self._batches))

    @property
    def census(self) -> Census:
        """Counts of the waiting sequences of the class that is offered rows."""
        return self.served.census

    @property
    def highest_priority(self) -> int | None:
        """The highest priority in the class that is offered rows; None if none waits."""
        return self.served.highest_priority

    def waiting_tokens(self, most: int) -> int:
        """Return the number of waiting prompt tokens of the class that is offered rows; stops counting at `most`."""
        return self.served.waiting_tokens(most)

    @property
    def expected_tokens(self) -> int:
        """Tokens of KV that the waiting sequences of both classes are expected to need."""
        return self._interactive.expected_tokens + self._batches.expected_tokens

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Yield the sequences that may start, best first. The caller may remove the sequence just yielded."""
        return self.served.candidates(match)

    def ordered(self, sequences: Iterable[Sequence], match: Callable[[Sequence], int]) -> list[Sequence]:
        """Return some of the waiting sequences in the order in which they would start, those of batches last."""
        interactive: list[Sequence] = []
        batches: list[Sequence] = []
        for sequence in sequences:
            (batches if sequence.is_batch else interactive).append(sequence)
        return self._interactive.ordered(interactive, match) + self._batches.ordered(batches, match)

    def check_room(self, request: ScheduleRequest, most: int, limits: Limits) -> None:
        """Check that the queue of the request's class, of `most` places, has room for its choices.

        Raises:
            QueueFullError: the server's, the tenant's or the subject's bound is reached; the message says which.
        """
        queue = self._batches if request.options.is_batch else self._interactive
        queue.check_room(request.view.subject, request.options.n, most, limits)

    def add(self, sequence: Sequence) -> None:
        self._of(sequence).add(sequence)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Put retracted sequences before all others of their class."""
        interactive: list[Sequence] = []
        batches: list[Sequence] = []
        for sequence in sequences:
            (batches if sequence.is_batch else interactive).append(sequence)
        self._interactive.put_back(interactive)
        self._batches.put_back(batches)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self._of(sequence).remove(sequence)

    def _of(self, sequence: Sequence) -> WaitingQueue:
        return self._batches if sequence.is_batch else self._interactive


@dataclass(frozen=True, slots=True)
class _Waiting:
    lines: dict[str, dict[str, WaitingLine]]
    _parts: tuple[OrderedDict[int, Sequence], ...]

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot: the caller removes the sequences that it starts."""
        return iter([sequence for part in self._parts for sequence in part.values() if sequence.may_start])


def _full(message: str) -> QueueFullError:
    return QueueFullError(f"{message}; try again later", retry_after_ms=RETRY_AFTER_MS)
