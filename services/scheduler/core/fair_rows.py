"""Preemption by weighted fair shares of the machine, between tenants and between the subjects of each tenant."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from common.types import Subject
    from services.scheduler.core.in_flight_prefixes import InFlightPrefixes
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import ClassQueues
    from services.scheduler.core.reservations import Reservations
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import Billing, VirtualCounters

K = TypeVar("K")

# A sequence generates at least this many tokens between preemptions, which bounds the recomputation.
QUANTUM_TOKENS = 32
# Plans between two checks of the shares, as a check takes time linear in the running and waiting sequences.
PLANS_BETWEEN_LOOKS = 4
# Tolerance for rounding errors of shares.
_TOLERANCE = 1e-9


class RowPreemption(Protocol):
    """Decides which rows give their pages back, for a waiting sequence or because memory ran out."""

    count: int
    """Number of rows preempted for waiting sequences."""

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Return the row to retract when running rows need pages."""

    def reserved_victims(self, sequence: Sequence | None = None) -> list[Sequence]:
        """Return the waiting sequences that hold pages in the order in which they give them up.

        They do so for running rows, or for a waiting `sequence` that memory does not suffice for.
        """

    def note_refusal(self, sequence: Sequence) -> None:
        """Record that memory did not suffice to admit a sequence."""

    def make_room(
        self, most_rows: int, in_flight: Callable[[], InFlightPrefixes], retract: Callable[[Sequence], None]
    ) -> Sequence | None:
        """Retract rows for a waiting sequence if at most `most_rows` may run; return the sequence to admit."""


class FairRows:
    """Preemption under fair shares.

    The shared resource is the scarce one: rows, or pages if rows are free. A waiting tenant below its share gets a row
    of the tenant that holds the most relative to its weight, provided that the latter keeps its own share; subjects of
    one tenant likewise divide what their tenant holds. The policy chooses the sequence to start, so a tenant that has
    been served more than others does not get their rows. Rows have a minimum quantum. Rows therefore cannot be
    preempted in cycles: after a preemption a tenant still has its share and takes nothing back, and each preemption
    comes after at least `QUANTUM_TOKENS` generated tokens.

    Of pages, waiting sequences have shares, too, that hold some for prompts from other groups. They give them up before
    rows do, and without a quantum, as nothing is computed again.

    With a single subject no row is preempted, and pages are taken from the lowest priority, then the youngest sequence,
    as under other policies. Priorities have no meaning between subjects.
    """

    def __init__(
        self,
        rows: RowSlots,
        queue: ClassQueues,
        memory: KvMemory,
        reservations: Reservations,
        billing: Billing,
        counters: VirtualCounters,
    ) -> None:
        """Read state that the core owns; `counters` hold the weights."""
        self.count = 0
        self._rows = rows
        self._queue = queue
        self._memory = memory
        self._reservations = reservations
        self._billing = billing
        self._counters = counters
        self._next_look = 0
        self._plans = 0
        self._lacks_memory = False
        self._most_rows = rows.max_rows

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Return the youngest row of the subject with most pages for its weight, within the tenant ranked likewise."""
        rows = list(candidates)
        return min(rows, key=self._order_of([*rows, *self._reservations.holders], self._pages_of))

    def reserved_victims(self, sequence: Sequence | None = None) -> list[Sequence]:
        """Return those of the subject with most pages for its weight first; none for a waiting one: see `make_room`."""
        holders = self._reservations.holders if sequence is None else []
        return sorted(holders, key=self._order_of([*self._rows.occupants(), *holders], self._pages_of))

    def note_refusal(self, sequence: Sequence) -> None:
        self._lacks_memory = True

    def make_room(
        self, most_rows: int, in_flight: Callable[[], InFlightPrefixes], retract: Callable[[Sequence], None]
    ) -> Sequence | None:
        """Retract rows for the policy's first waiting sequence, if it is entitled to them and they suffice."""
        self._plans += 1
        self._most_rows = most_rows
        lacks_rows = self._rows.running >= most_rows
        lacks_memory, self._lacks_memory = self._lacks_memory, False
        if not (lacks_rows or lacks_memory):
            return None
        if self._plans < self._next_look or not self._is_contended():
            # A refusal stays recorded until the next check.
            self._lacks_memory = lacks_memory
            return None
        self._next_look = self._plans + PLANS_BETWEEN_LOOKS
        if lacks_rows and not self._has_spare_rows():
            return None
        self._billing.settle()
        waiting = in_flight()
        candidates = self._queue.candidates(self._memory.match)
        ready = (sequence for sequence in candidates if not sequence.awaits_arrival)
        first = next((sequence for sequence in ready if not waiting.is_awaited(sequence)), None)
        if first is None:
            return None
        victims = self._victims(first, lacks_rows=lacks_rows)
        for victim in victims:
            if victim.row is None:
                self._reservations.take([victim])
                continue
            victim.preemptions += 1
            self.count += 1
            retract(victim)
        return first if victims else None

    def _is_contended(self) -> bool:
        running, waiting = self._rows.census, self._queue.census
        if not waiting.tenants or not running.tenants:
            return False
        if len(running.tenants) > 1 or running.tenants.keys() != waiting.tenants.keys():
            return True
        tenant = next(iter(running.tenants))
        return len(running.subjects[tenant]) > 1 or running.subjects[tenant].keys() != waiting.subjects[tenant].keys()

    def _has_spare_rows(self) -> bool:
        """Whether some tenant would keep its share without one of its rows, or some subject has several rows."""
        running = self._rows.census
        if any(max(subjects.values()) > 1 for subjects in running.subjects.values()):
            return True
        shares = self._tenant_shares(running.tenants, is_of_rows=True)
        return any(held - 1 >= shares[tenant] - _TOLERANCE for tenant, held in running.tenants.items())

    def _victims(self, first: Sequence, *, lacks_rows: bool) -> list[Sequence]:
        """Return rows that suffice for `first` and leave their tenants and subjects their shares.

        Empty if there are none.
        """
        amount = _one if lacks_rows else self._pages_of
        rows = self._rows.occupants()
        if not lacks_rows:
            rows += self._reservations.holders
        victims: list[Sequence] = []
        pages = 0
        while not (victims and self._missing_pages(first, sum(each.row is not None for each in rows)) <= pages):
            victim = self._next_victim(first, rows, amount, is_of_rows=lacks_rows)
            if victim is None:
                return []
            victims.append(victim)
            rows.remove(victim)
            pages += self._pages_of(victim)
        return victims

    def _next_victim(
        self, first: Sequence, rows: list[Sequence], amount: Callable[[Sequence], int], *, is_of_rows: bool
    ) -> Sequence | None:
        if not rows:
            return None
        subject = first.request.view.subject
        tenants, subjects = _held(rows, amount)
        shares = self._tenant_shares(tenants, is_of_rows=is_of_rows)
        if tenants[subject.tenant] < shares[subject.tenant] - _TOLERANCE:
            givers = [
                row
                for row in rows
                if (tenant := row.request.view.tenant) != subject.tenant
                and tenants[tenant] - amount(row) >= shares[tenant] - _TOLERANCE
            ]
            if givers:
                return self._first_after_quantum(givers, rows, amount)
        own = self._subject_shares(subject.tenant, tenants[subject.tenant], subjects, is_of_rows=is_of_rows)
        if subjects[subject] >= own[subject] - _TOLERANCE:
            return None
        givers = [
            row
            for row in rows
            if (other := row.request.view.subject).tenant == subject.tenant
            and other != subject
            and subjects[other] - amount(row) >= own[other] - _TOLERANCE
        ]
        return self._first_after_quantum(givers, rows, amount)

    def _first_after_quantum(
        self, givers: list[Sequence], rows: list[Sequence], amount: Callable[[Sequence], int]
    ) -> Sequence | None:
        order = self._order_of(rows, amount)
        reserved = [each for each in givers if each.remote is not None and each.remote.can_leave_device]
        ready = [row for row in givers if row.row is not None and self._generated(row) >= QUANTUM_TOKENS]
        return min(reserved or ready, key=order, default=None)

    def _order_of(
        self, rows: list[Sequence], amount: Callable[[Sequence], int]
    ) -> Callable[[Sequence], tuple[float, str, float, str, int, int]]:
        """Return the order in which `rows` are preempted, as a sort key."""
        tenants, subjects = _held(rows, amount)
        by_tenant = {tenant: held / self._counters.weight_of_tenant(tenant) for tenant, held in tenants.items()}
        by_subject = {subject: held / self._counters.weight_of_subject(subject) for subject, held in subjects.items()}

        def key(sequence: Sequence) -> tuple[float, str, float, str, int, int]:
            subject = sequence.request.view.subject
            of_tenant, of_subject = -by_tenant[subject.tenant], -by_subject[subject]
            priority = sequence.request.options.priority
            return of_tenant, subject.tenant, of_subject, subject.name, priority, -sequence.handle

        return key

    def _tenant_shares(self, held: Mapping[str, int], *, is_of_rows: bool) -> dict[str, float]:
        waiting = self._queue.census.tenants
        names = held.keys() | waiting.keys()
        weights = {name: self._counters.weight_of_tenant(name) for name in names}
        if is_of_rows:
            demands = {name: held.get(name, 0) + waiting[name] for name in names}
            return max_min_shares(self._most_rows, weights, demands)
        # The tenants' demand for memory is not known.
        return max_min_shares(sum(held.values()) + self._memory.available_pages, weights)

    def _subject_shares(
        self, tenant: str, total: int, held: Mapping[Subject, int], *, is_of_rows: bool
    ) -> dict[Subject, float]:
        waiting: Counter[Subject] = self._queue.census.subjects.get(tenant, Counter())
        names = {subject for subject in held if subject.tenant == tenant} | waiting.keys()
        weights = {subject: self._counters.weight_of_subject(subject) for subject in names}
        if not is_of_rows:
            return max_min_shares(total, weights)
        return max_min_shares(total, weights, {name: held.get(name, 0) + waiting[name] for name in names})

    def _generated(self, sequence: Sequence) -> int:
        """Return the number of tokens generated since the row was opened."""
        assert sequence.row is not None, "it runs"
        return int(self._rows.length[sequence.row]) - len(sequence.token_ids)

    def _pages_of(self, sequence: Sequence) -> int:
        if sequence.row is not None:
            return int(self._rows.page_count[sequence.row])
        assert sequence.remote is not None, "it runs, or its prompt comes from another group"
        return sequence.remote.held_pages

    def _missing_pages(self, sequence: Sequence, running: int) -> int:
        """Return the number of pages a waiting sequence lacks beside `running` rows, which keep one spare page each."""
        needed = self._memory.pages_of(len(sequence.token_ids))
        if not needed:
            return 0
        found = self._memory.match(sequence) // self._rows.page_size
        return needed - found + running - self._memory.available_pages


def max_min_shares(
    total: float, weights: Mapping[K, float], demands: Mapping[K, float] | None = None
) -> dict[K, float]:
    """Divide `total` by weight; shares above their demand are capped, and the remainder goes to the others (max-min).

    Without demands each name gets its part by weight.
    """
    if demands is None:
        whole = sum(weights.values())
        return {name: total * weight / whole for name, weight in weights.items()}
    shares: dict[K, float] = {}
    left, whole = total, sum(weights.values())
    for name in sorted(weights, key=lambda name: demands[name] / weights[name]):
        shares[name] = min(demands[name], left * weights[name] / whole)
        left -= shares[name]
        whole -= weights[name]
    return shares


def _one(_sequence: Sequence) -> int:
    return 1


def _held(rows: Iterable[Sequence], amount: Callable[[Sequence], int]) -> tuple[Counter[str], Counter[Subject]]:
    """Return the amounts that each tenant and each subject has of `rows`."""
    tenants: Counter[str] = Counter()
    subjects: Counter[Subject] = Counter()
    for row in rows:
        subject, held = row.request.view.subject, amount(row)
        tenants[subject.tenant] += held
        subjects[subject] += held
    return tenants, subjects
