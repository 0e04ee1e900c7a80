"""Eviction order: the tenant most over its quota, within it the subject, then the coldest leaf."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from services.scheduler.cache.eviction_order import SPARE_ENTRIES, C, Ranking, coldness_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from services.scheduler.cache.accounts import Accounts
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.eviction_order import Coldness, Urgency
    from services.scheduler.cache.node import Account, Holder

# Standings of a holding, the first to be evicted first.
_OVER_QUOTA, _WITHIN_QUOTA, _WITHIN_FLOOR = range(3)


@dataclass(slots=True, eq=False, repr=False)
class SubjectHolding(Generic[C]):
    """Pages and candidates of a subject, or of a common holder, on one tier."""

    holder: Holder
    tenant: TenantHolding[C]
    pages: int = 0
    candidates: int = 0
    heap: list[tuple[Coldness, int, C]] = field(default_factory=list)

    def first(self) -> C | None:
        """Return the candidate that is evicted next."""
        while self.heap:
            _, number, candidate = self.heap[0]
            if candidate.queued == number:
                return candidate
            heapq.heappop(self.heap)
        return None


@dataclass(slots=True, eq=False, repr=False)
class TenantHolding(Generic[C]):
    """Pages of a tenant on one tier, and its subjects with candidates: by urgency, and by size for its quota."""

    holder: Holder
    by_urgency: Ranking[SubjectHolding[C]]
    by_size: Ranking[SubjectHolding[C]]
    pages: int = 0
    members: int = 0
    candidates: int = 0


class EvictionQueue(Generic[C]):
    """Counts each holder's pages on one tier, and orders the tier's candidates by tenant, subject and coldness.

    On the device, candidates are LIVE nodes without locks and without LIVE children. The next victim belongs to the
    tenant most over its quota, and within it to the subject with the most pages relative to its share, if these exceed
    its share of that quota; otherwise it is the coldest candidate, but of subjects over their quota first and of
    holders within their floor last. Floors of subjects count among the subjects of their tenant only, so many names
    protect no more of the tenant's pages than its own floor does.

    The quota of a tenant without a share of its own is an equal part, for each active one, of the pages that such
    tenants hold, idle ones included. So one tenant alone may have everything, and several that want memory each get as
    much. Public text that is not pinned counts as one more tenant's. Candidates unused for `active_epochs`, public or
    not, are evicted before the excess over a tenant's quota: a quota protects only nodes in use. Changes cost O(log n),
    a victim O(log n) amortised.
    """

    def __init__(self, config: CacheConfig, capacity: int, accounts: Accounts) -> None:
        """Start empty, for a tier of `capacity` pages."""
        self._config = config
        self._capacity = capacity
        self._accounts = accounts
        self._coldness = coldness_of(config)
        self._subjects: dict[Holder, SubjectHolding[C]] = {}
        self._tenants: dict[Holder, TenantHolding[C]] = {}
        # Tenants with candidates: all, those without a share of their own, and those with one.
        self._by_coldness: Ranking[TenantHolding[C]] = Ranking(self._tenant_urgency)
        self._by_size: Ranking[TenantHolding[C]] = Ranking(self._tenant_size)
        self._by_excess: Ranking[TenantHolding[C]] = Ranking(self._tenant_excess)
        self._next = 0
        self._epoch = 0
        # Pages of all tenants, and of active ones with a share of their own; both exclude the public.
        self._pages = 0
        self._reserved_pages = 0
        # Quotas of active tenants with a share of their own.
        self._reserved_quotas = 0
        self._version = accounts.version
        self._limits_version = accounts.limits_version
        accounts.on_activation(self._note_floor)

    # --- pages of holders ---

    def charge(self, account: Account, pages: int) -> None:
        """Count pages that an account gained, or lost if negative."""
        subject = self._subjects.get(account.holder) or self._holding(account.holder)
        tenant = subject.tenant
        subject.pages += pages
        tenant.pages += pages
        holder = tenant.holder
        if not holder.is_common:
            self._pages += pages
            if holder.share is not None and holder.is_active:
                self._reserved_pages += pages
        if pages > 0:
            if tenant.candidates:
                self._note(subject)
        else:
            # A subject that is within its floor now ranks after one of its tenant that may be colder.
            self._note_tenant(tenant)
            self._forget_if_empty(subject)

    def excess(self, account: Account) -> int:
        """Return by how many pages the account's subject exceeds its quota of the tier; 0 or less if it does not."""
        holder = account.holder
        if holder.is_common or holder.share is None or (holding := self._subjects.get(holder)) is None:
            return 0
        return holding.pages - (int(self._capacity * holder.share) or 1)

    def begin_epoch(self, epoch: int, idle: Iterable[Holder]) -> None:
        """Set the epoch; the subjects and tenants in `idle` have lost their floors."""
        self._epoch = epoch
        for holder in idle:
            if holder.parent is None:
                tenant = self._tenants.get(holder)
                if tenant is not None:
                    self._note_tenant(tenant)
            elif (subject := self._subjects.get(holder)) is not None:
                self._note(subject)

    # --- candidates ---

    def push(self, candidate: C) -> None:
        """Add a candidate with its current coldness."""
        assert not candidate.queued
        self._next += 1
        candidate.queued = self._next
        subject = self._holding(candidate.owner.holder)
        heapq.heappush(subject.heap, (self._coldness(candidate), candidate.queued, candidate))
        subject.candidates += 1
        if subject.candidates == 1:
            subject.tenant.candidates += 1
        if subject.candidates == 1 or subject.heap[0][2] is candidate:
            self._note(subject)

    def discard(self, candidate: C) -> None:
        """Remove a candidate, if it is one."""
        if not candidate.queued:
            return
        candidate.queued = 0
        subject = self._subjects[candidate.owner.holder]
        subject.candidates -= 1
        if not subject.candidates:
            subject.heap.clear()
            tenant = subject.tenant
            tenant.by_urgency.drop(subject)
            tenant.by_size.drop(subject)
            tenant.candidates -= 1
            if not tenant.candidates:
                for ranking in (self._by_coldness, self._by_size, self._by_excess):
                    ranking.drop(tenant)
            # The next subject may be within its floor and yet colder.
            self._note_tenant(tenant)
        elif len(subject.heap) > 2 * subject.candidates + SPARE_ENTRIES:
            subject.heap = [entry for entry in subject.heap if entry[2].queued == entry[1]]
            heapq.heapify(subject.heap)

    def first(self) -> C | None:
        """Return the candidate that is evicted next, without removing it."""
        self._refresh()
        coldest = self._by_coldness.first()
        if coldest is None:
            return None
        subject = coldest.by_urgency.first()
        assert subject is not None, "ranked tenants have candidates"
        over = self._most_over()
        if over is not None and not self._is_stale(subject):
            subject = self._first_of_tenant(over)
        return subject.first()

    def first_of(self, account: Account) -> C | None:
        """Return the candidate that an account's subject gives up next."""
        subject = self._subjects.get(account.holder)
        return None if subject is None else subject.first()

    def is_current(self, candidate: C) -> bool:
        """Whether the candidate returned by `first` is still as cold as when it was pushed."""
        return bool(self._subjects[candidate.owner.holder].heap[0][0] == self._coldness(candidate))

    def candidate(self, number: int) -> C | None:
        """Return some candidate, varying with `number`, for samples. O(1)."""
        tenant = self._by_coldness.any(number)
        subject = None if tenant is None else tenant.by_urgency.any(number)
        if subject is None or not subject.heap:
            return None
        node = subject.heap[number % len(subject.heap)][2]
        return node if node.queued else None

    # --- for invariants and tests ---

    @property
    def entries(self) -> int:
        """Number of entries in all heaps and lists."""
        ranked = len(self._by_coldness) + len(self._by_size) + len(self._by_excess)
        ranked += sum(len(tenant.by_urgency) + len(tenant.by_size) for tenant in self._tenants.values())
        return ranked + sum(len(subject.heap) for subject in self._subjects.values())

    def holders(self) -> dict[Holder, int]:
        """Return the number of pages of each subject and each tenant."""
        subjects = {holding.holder: holding.pages for holding in self._subjects.values() if holding.pages}
        tenants = {holding.holder: holding.pages for holding in self._tenants.values() if holding.pages}
        return subjects | tenants

    def places(self) -> Iterator[tuple[tuple[Urgency, ...], C]]:
        """Yield each candidate with its position, computed without the heaps; the lowest is evicted first."""
        self._refresh()
        held = [subject for subject in self._subjects.values() if subject.candidates]
        coldest = min(
            held, key=lambda each: (self._tenant_urgency(each.tenant), self._subject_urgency(each)), default=None
        )
        over = [each.tenant for each in held if self._excess(each.tenant) is not None]
        first = max(over, key=lambda each: (self._excess(each), -each.holder.number), default=None)
        if coldest is not None and self._is_stale(coldest):
            first = None
        for subject in held:
            tenant = subject.tenant
            place: tuple[Urgency, ...] = ((1,), self._tenant_urgency(tenant), self._subject_urgency(subject))
            if tenant is first and self._is_over_within(subject):
                place = ((0,), (0,), self._size_urgency(subject))
            elif tenant is first:
                place = ((0,), (1,), self._subject_urgency(subject))
            for coldness, number, candidate in subject.heap:
                if candidate.queued == number:
                    yield (*place, (*coldness, number)), candidate

    # --- helpers ---

    def _holding(self, holder: Holder) -> SubjectHolding[C]:
        subject = self._subjects.get(holder)
        if subject is None:
            tenant = self._tenants.get(holder.tenant)
            if tenant is None:
                rankings = Ranking(self._subject_urgency), Ranking(self._size_urgency)
                tenant = self._tenants[holder.tenant] = TenantHolding(holder.tenant, *rankings)
            tenant.members += 1
            subject = self._subjects[holder] = SubjectHolding(holder, tenant)
        return subject

    def _forget_if_empty(self, subject: SubjectHolding[C]) -> None:
        if subject.pages or subject.candidates:
            return
        tenant = subject.tenant
        del self._subjects[subject.holder]
        tenant.members -= 1
        if not tenant.members:
            del self._tenants[tenant.holder]

    def _note(self, subject: SubjectHolding[C]) -> None:
        """Note that a subject, and so its tenant, may have become more urgent."""
        if subject.candidates:
            subject.tenant.by_urgency.note(subject)
            if not subject.holder.is_common:
                subject.tenant.by_size.note(subject)
        self._note_tenant(subject.tenant)

    def _note_floor(self, holder: Holder) -> None:
        """Handle a subject's activation: with its floor, another of its tenant may be next, which may be colder."""
        tenant = self._tenants.get(holder.tenant)
        if tenant is not None:
            self._note_tenant(tenant)

    def _note_tenant(self, tenant: TenantHolding[C]) -> None:
        if not tenant.candidates:
            return
        self._by_coldness.note(tenant)
        if not tenant.holder.is_common:
            (self._by_size if tenant.holder.share is None else self._by_excess).note(tenant)

    def _refresh(self) -> None:
        """Apply changes of the limits and of the set of active tenants."""
        accounts = self._accounts
        if self._limits_version != accounts.limits_version:
            self._limits_version = accounts.limits_version
            for tenant in self._tenants.values():
                self._by_size.drop(tenant)
                self._by_excess.drop(tenant)
            for subject in self._subjects.values():
                self._note(subject)
        if self._version != accounts.version:
            self._version = accounts.version
            reserved = [
                tenant
                for tenant in self._tenants.values()
                if tenant.holder.share is not None and tenant.holder.is_active
            ]
            self._reserved_pages = sum(tenant.pages for tenant in reserved)
            self._reserved_quotas = int(sum(map(self._quota, reserved)))

    def _most_over(self) -> TenantHolding[C] | None:
        """Return the tenant that exceeds its quota by most, if any does."""
        tenants = [tenant for ranking in (self._by_size, self._by_excess) if (tenant := ranking.first()) is not None]
        public = self._tenants.get(self._accounts.public.holder.tenant)
        if public is not None and public.candidates:
            tenants.append(public)
        over = [(excess, -each.holder.number, each) for each in tenants if (excess := self._excess(each)) is not None]
        return max(over)[2] if over else None

    def _first_of_tenant(self, tenant: TenantHolding[C]) -> SubjectHolding[C]:
        """Return the subject from which a tenant over its quota evicts."""
        largest = tenant.by_size.first()
        if largest is not None and self._is_over_within(largest):
            return largest
        subject = tenant.by_urgency.first()
        assert subject is not None, "ranked tenants have candidates"
        return subject

    def _quota(self, tenant: TenantHolding[C]) -> float:
        """Return the number of pages that a tenant may have before its own are evicted for others."""
        if tenant.holder.share is not None:
            return max(1, int(self._capacity * tenant.holder.share))
        return (self._pages - self._reserved_pages) / max(self._accounts.active_tenants, 1)

    def _excess(self, tenant: TenantHolding[C]) -> float | None:
        """Return by how many pages a tenant exceeds its quota; None if it does not or its floor protects it.

        If several tenants have equal parts as quotas, those that hold exactly their quota can be evicted from, too.
        """
        holder = tenant.holder
        if holder.is_common:
            return self._public_excess(tenant)
        if self._is_within_floor(tenant):
            return None
        excess = tenant.pages - self._quota(tenant)
        if holder.share is None and self._accounts.active_tenants > 1:
            return excess if excess >= 0 else None
        return excess if excess > 0 else None

    def _public_excess(self, public: TenantHolding[C]) -> float | None:
        """Return by how many pages the public exceeds its part; None if it does not, or if all candidates are pinned.

        It counts as one more tenant without a share of its own: tenants that share globally can make text public.
        """
        subject = public.by_urgency.first()
        first = None if subject is None else subject.first()
        if first is None or first.pinned:
            return None
        excess: float = public.pages - max(self._capacity - self._reserved_quotas, 0)
        if active := self._accounts.active_tenants:
            held = public.pages + self._pages - self._reserved_pages
            excess = max(excess, public.pages - held / (active + 1))
        return excess if excess > 0 else None

    def _is_over_within(self, subject: SubjectHolding[C]) -> bool:
        """Whether a subject has more than its share of its tenant's quota."""
        return not subject.holder.is_common and self._size(subject) > self._quota(subject.tenant)

    def _is_within_floor(self, holding: SubjectHolding[C] | TenantHolding[C]) -> bool:
        return holding.holder.is_active and holding.pages <= int(self._capacity * holding.holder.floor)

    def _is_stale(self, subject: SubjectHolding[C]) -> bool:
        """Whether a subject's next candidate has been unused for so long that no quota protects it."""
        first = subject.first()
        assert first is not None, "ranked subjects have candidates"
        used = first.epoch + self._config.public_bonus_epochs * first.u_pre.bit_length()
        return not first.pinned and self._epoch - used > self._config.active_epochs

    def _standing(self, holding: SubjectHolding[C]) -> int:
        if holding.holder.is_common:
            return _WITHIN_QUOTA
        if self._is_within_floor(holding):
            return _WITHIN_FLOOR
        assert holding.holder.share is not None, "subjects have a share"
        is_over = holding.pages > max(1, int(self._capacity * holding.holder.share))
        return _OVER_QUOTA if is_over else _WITHIN_QUOTA

    def _size(self, subject: SubjectHolding[C]) -> float:
        """Return a subject's pages divided by its share."""
        assert subject.holder.share is not None, "subjects have a share"
        return subject.pages / subject.holder.share

    def _size_urgency(self, subject: SubjectHolding[C]) -> Urgency:
        return -self._size(subject), subject.holder.number

    def _subject_urgency(self, subject: SubjectHolding[C]) -> Urgency:
        first = subject.first()
        assert first is not None, "ranked subjects have candidates"
        standing = self._standing(subject)
        if standing == _OVER_QUOTA:
            return standing, *self._size_urgency(subject)
        coldness, queued, _ = subject.heap[0]
        return standing, *coldness, queued

    def _tenant_urgency(self, tenant: TenantHolding[C]) -> Urgency:
        """Return a tenant's rank by its next victim; only its own floor counts among tenants."""
        first = tenant.by_urgency.first()
        assert first is not None, "ranked tenants have candidates"
        inner = self._subject_urgency(first)
        return self._is_within_floor(tenant), min(inner[0], _WITHIN_QUOTA), *inner[1:]

    def _tenant_size(self, tenant: TenantHolding[C]) -> Urgency:
        return self._is_within_floor(tenant), -tenant.pages, tenant.holder.number

    def _tenant_excess(self, tenant: TenantHolding[C]) -> Urgency:
        return self._is_within_floor(tenant), self._quota(tenant) - tenant.pages, tenant.holder.number
