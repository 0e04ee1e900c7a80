"""Counts of sequences by tenant and subject."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.types import Subject


class Census:
    """Counters that keep no entry at zero."""

    def __init__(self) -> None:
        self.tenants: Counter[str] = Counter()
        # Counts per subject, by tenant.
        self.subjects: dict[str, Counter[Subject]] = {}

    def of(self, subject: Subject) -> int:
        """Return the number of sequences of `subject`."""
        subjects = self.subjects.get(subject.tenant)
        return 0 if subjects is None else subjects[subject]

    def add(self, subject: Subject) -> None:
        self.tenants[subject.tenant] += 1
        self.subjects.setdefault(subject.tenant, Counter())[subject] += 1

    def remove(self, subject: Subject) -> None:
        tenant, subjects = subject.tenant, self.subjects[subject.tenant]
        subjects[subject] -= 1
        if not subjects[subject]:
            del subjects[subject]
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant], self.subjects[tenant]
