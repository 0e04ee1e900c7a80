"""Fair compiling: turns of tenants and their subjects, and the compile seconds of each subject."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from common.grammars import GrammarScope

Item = TypeVar("Item")
# Subjects and tenants whose last turn is remembered, so that leaving the queue and coming back gains nothing.
MAX_REMEMBERED = 65_536
# Time after which a compile budget is full again.
REFILL_S = 60.0
# Subjects in debt; beyond this number, those with the least debt are forgotten.
MAX_SUBJECTS = 65_536


class Turns(Generic[Item]):
    """A queue in which each subject's items are in order.

    An item at the head of its subject's waits for at most one turn of each other tenant and, for each turn of its own
    tenant, of each other subject of that.
    """

    def __init__(self) -> None:
        """Start empty."""
        # By tenant, then subject, each in the order in which they came.
        self._tenants: dict[str, dict[str, deque[Item]]] = {}
        self._count = 0
        # Number of the last turn of a tenant (its name and None) and of a subject.
        self._served: OrderedDict[tuple[str, str | None], int] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return self._count

    def add(self, scope: GrammarScope, item: Item) -> None:
        """Let an item wait after the others of its subject."""
        self._tenants.setdefault(scope.tenant, {}).setdefault(scope.subject, deque()).append(item)
        self._count += 1

    def take(self, passed_over: Set[tuple[str, str]] = frozenset()) -> Item | None:
        """Remove and return the item whose turn it is; None if none waits but of subjects that are passed over."""
        waiting = [
            (tenant, subject)
            for tenant, subjects in self._tenants.items()
            for subject in subjects
            if (tenant, subject) not in passed_over
        ]
        if not waiting:
            return None
        tenant, subject = min(waiting, key=lambda key: (self._served.get((key[0], None), 0), self._served.get(key, 0)))
        item = self._tenants[tenant][subject].popleft()
        self._turn += 1
        for key in ((tenant, None), (tenant, subject)):
            self._served[key] = self._turn
            self._served.move_to_end(key)
        while len(self._served) > MAX_REMEMBERED:
            self._served.popitem(last=False)
        self._removed(tenant, subject)
        return item

    def remove(self, scope: GrammarScope, item: Item) -> bool:
        """Remove an item; return whether it was waiting."""
        try:
            self._tenants[scope.tenant][scope.subject].remove(item)
        except (KeyError, ValueError):
            return False
        self._removed(scope.tenant, scope.subject)
        return True

    def waiting(self, tenant: str) -> int:
        """Return the number of items of a tenant that wait."""
        return sum(map(len, self._tenants.get(tenant, {}).values()))

    def last_of_longest(self) -> Item:
        """Remove and return the newest item of the subject that has most, in the tenant that has most."""
        tenant = max(self._tenants, key=self.waiting)
        subjects = self._tenants[tenant]
        subject = max(subjects, key=lambda name: len(subjects[name]))
        item = subjects[subject].pop()
        self._removed(tenant, subject)
        return item

    def _removed(self, tenant: str, subject: str) -> None:
        self._count -= 1
        if not self._tenants[tenant][subject]:
            del self._tenants[tenant][subject]
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class CompileBudget:
    """Counts what subjects have used lately. A subject may go into debt by one compilation, which it then waits off."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """Allow `seconds` of compiling a minute."""
        self._seconds = seconds
        self._clock = clock
        # Seconds used and not yet refilled, and when that was so.
        self._used: dict[tuple[str, str], tuple[float, float]] = {}

    def charge(self, scope: GrammarScope, seconds: float) -> None:
        """Count seconds of compiling."""
        used = self._used_now(scope) + seconds
        self._used[scope.tenant, scope.subject] = (used, self._clock())
        if len(self._used) > MAX_SUBJECTS:
            now = self._clock()
            self._used = {key: entry for key, entry in self._used.items() if self._left(entry, now) > 0}
        if len(self._used) > MAX_SUBJECTS:
            del self._used[min(self._used, key=lambda key: self._left(self._used[key], self._clock()))]

    def wait_s(self, scope: GrammarScope) -> float:
        """Return after how many seconds a subject may compile again; 0: now."""
        return max(0.0, self._used_now(scope) - self._seconds) * REFILL_S / self._seconds

    def _used_now(self, scope: GrammarScope) -> float:
        entry = self._used.get((scope.tenant, scope.subject))
        return 0.0 if entry is None else self._left(entry, self._clock())

    def _left(self, entry: tuple[float, float], now: float) -> float:
        used, at = entry
        return max(0.0, used - (now - at) * self._seconds / REFILL_S)
