"""Which text is encoded next: the work is shared between tenants, and in each between its subjects."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from common.types import Subject

Item = TypeVar("Item")
# Parties without work that may be remembered before those that no longer matter are dropped.
MAX_ABSENT = 1024


class Shares:
    """Virtual times of parties that share work, as in weighted fair queueing (Demers, Keshav and Shenker, 1989).

    A party's time advances by the cost of its work, and the earliest is next. The present advances by what each party
    could have had. A party that comes back after a pause starts at the present, so that it cannot save up, and keeps
    what it is ahead by, so that leaving gains nothing.
    """

    def __init__(self) -> None:
        """Start without parties."""
        self._times: dict[str, float] = {}
        self._now = 0.0
        # What the work that was begun last advances the present by: who joins meanwhile goes before its party's next.
        self._begun = 0.0

    def join(self, party: str) -> None:
        """Let a party take part."""
        self._times[party] = max(self._times.get(party, 0.0), self._now)

    def in_order(self, parties: Collection[str]) -> Iterator[str]:
        """Return parties that have joined, the next one first. As a rule only the first is asked for."""
        first = min(parties, key=self._times.__getitem__)
        yield first
        yield from sorted((party for party in parties if party != first), key=self._times.__getitem__)

    def charge(self, party: str, cost: float, parties: int) -> None:
        """Count work of one of so many parties that have work."""
        self._now += self._begun
        self._begun = cost / parties
        self._times[party] += cost

    def forget_absent(self, present: Collection[str]) -> None:
        """Drop parties that are not `present` and not ahead."""
        if len(self._times) > len(present) + MAX_ABSENT:
            kept = {party: time for party, time in self._times.items() if party in present or time > self._now}
            self._times = kept


class FairQueue(Generic[Item]):
    """A queue in which each subject's items are in order.

    While two tenants, or two subjects of one, have items, the costs of what has been taken from each grow alike: they
    never differ by more than the largest item of each. An item at the head of its subject's waits for a bounded number
    of others, however many names come and go.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: dict[str, dict[str, deque[tuple[Item, float]]]] = {}
        self._clear()

    def add(self, subject: Subject, item: Item, cost: float) -> None:
        """Append an item to its subject's; `cost` is positive."""
        if subject.tenant not in self._waiting:
            self._waiting[subject.tenant] = {}
            self._tenants.join(subject.tenant)
            self._subjects.setdefault(subject.tenant, Shares())
        subjects = self._waiting[subject.tenant]
        if subject.name not in subjects:
            subjects[subject.name] = deque()
            self._subjects[subject.tenant].join(subject.name)
        subjects[subject.name].append((item, cost))

    def take(self, may_start: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next item that is the first of its subject and may start; None if there is none."""
        for tenant in self._tenants.in_order(self._waiting) if self._waiting else ():
            subjects, shares = self._waiting[tenant], self._subjects[tenant]
            for subject in shares.in_order(subjects):
                item, cost = subjects[subject][0]
                if may_start(item):
                    self._tenants.charge(tenant, cost, len(self._waiting))
                    shares.charge(subject, cost, len(subjects))
                    subjects[subject].popleft()
                    self._drop_if_empty(tenant, subject)
                    return item
        return None

    def remove(self, subject: Subject, item: Item) -> bool:
        """Remove an item; return whether it was waiting."""
        waiting = self._waiting.get(subject.tenant, {}).get(subject.name, ())
        for index, (found, _) in enumerate(waiting):
            if found is item:
                del self._waiting[subject.tenant][subject.name][index]
                self._drop_if_empty(subject.tenant, subject.name)
                return True
        return False

    def _drop_if_empty(self, tenant: str, subject: str) -> None:
        subjects = self._waiting[tenant]
        if not subjects[subject]:
            del subjects[subject]
            self._subjects[tenant].forget_absent(subjects)
        if not subjects:
            del self._waiting[tenant]
        if not self._waiting:
            self._clear()

    def _clear(self) -> None:
        """Forget who has had how much: when nothing waits, nobody is owed anything."""
        self._tenants = Shares()
        self._subjects: dict[str, Shares] = {}
