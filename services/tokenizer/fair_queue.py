"""The order of encoding: tenants share the work, and the subjects of each tenant share its part."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from common.types import Subject

Item = TypeVar("Item")
# Number of parties without work that are kept before those without effect are dropped.
MAX_ABSENT = 1024


class Shares:
    """Virtual times of parties that share work, as in weighted fair queueing (Demers, Keshav and Shenker, 1989).

    A party's time advances by the cost of its work, and the earliest party is next. The present advances by each
    party's fair share. A party that returns after a pause starts at the present, so that it cannot accumulate credit,
    and keeps its lead over the present, so that leaving gains nothing.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0
        # The advance of the present for the work started last, applied with the next charge: a party that joins in
        # between precedes the next work of that party.
        self._begun = 0.0

    def join(self, party: str) -> None:
        """Add a party, at the present or at its own later time."""
        self._times[party] = max(self._times.get(party, 0.0), self._now)

    def in_order(self, parties: Collection[str]) -> Iterator[str]:
        """Yield joined parties by their virtual time. Callers usually need only the first."""
        first = min(parties, key=self._times.__getitem__)
        yield first
        yield from sorted((party for party in parties if party != first), key=self._times.__getitem__)

    def charge(self, party: str, cost: float, parties: int) -> None:
        """Charge `party` for work, while `parties` parties have work."""
        self._now += self._begun
        self._begun = cost / parties
        self._times[party] += cost

    def forget_absent(self, present: Collection[str]) -> None:
        """Drop parties that are not `present` and not ahead of the present time."""
        if len(self._times) > len(present) + MAX_ABSENT:
            kept = {party: time for party, time in self._times.items() if party in present or time > self._now}
            self._times = kept


class FairQueue(Generic[Item]):
    """A queue that preserves the order of each subject's items and shares service fairly.

    While two tenants, or two subjects of one, have items, the costs of the items taken from each grow alike: they never
    differ by more than the largest item of each. The first item of a subject waits for a bounded number of others, no
    matter how many names join and leave.
    """

    def __init__(self) -> None:
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
        """Remove and return the next first item of a subject that may start; None if there is none."""
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
        """Reset all shares: without waiting items, past use does not matter."""
        self._tenants = Shares()
        self._subjects: dict[str, Shares] = {}
