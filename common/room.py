"""Bounds on the waiting places that a tenant or a subject can take, so that one flood cannot fill all of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.errors import QueueFullError

if TYPE_CHECKING:
    from common.types import Subject

# A tenant may hold at most SHARE times as many places as are free; a subject at most as many as its tenant may add.
SHARE = 3


class SharedRoom:
    """Counts taken places by tenant and subject against a dynamic threshold (Choudhury and Hahne, 1998).

    A single tenant can take three quarters of all places, a single subject 60 %; the rest stays free for others. A
    tenant or subject that holds no place is admitted as long as any place is free.
    """

    def __init__(self, places: int, what: str, retry_after_ms: int) -> None:
        """Start with all `places` free. `what` completes the error message "too many requests are …"."""
        self._places = places
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._taken = 0
        self._by_tenant: Counter[str] = Counter()
        self._by_subject: Counter[Subject] = Counter()

    def take(self, subject: Subject, places: int = 1) -> None:
        """Take places for a subject, all or none.

        Raises:
            QueueFullError: too few places are free; the message names the bound that is reached.
        """
        if not places:
            return
        left = self._places - self._taken - places
        if left < 0:
            raise self._full("too many requests", "at this server")
        tenant, own = self._by_tenant[subject.tenant], self._by_subject[subject]
        tenant_left = SHARE * left - tenant - places
        if tenant and tenant_left < 0:
            raise self._full("too many requests of this organization", "")
        if own and tenant_left - own - places < 0:
            raise self._full("too many requests of this user", "")
        self._taken += places
        self._by_tenant[subject.tenant] += places
        self._by_subject[subject] += places

    def give_back(self, subject: Subject, places: int = 1) -> None:
        """Free places that were taken with `take`."""
        self._taken -= places
        self._by_tenant[subject.tenant] -= places
        if not self._by_tenant[subject.tenant]:
            del self._by_tenant[subject.tenant]
        self._by_subject[subject] -= places
        if not self._by_subject[subject]:
            del self._by_subject[subject]

    def _full(self, whose: str, where: str) -> QueueFullError:
        message = " ".join(part for part in (whose, "are", self._what, where) if part)
        return QueueFullError(f"{message}; try again later", retry_after_ms=self._retry_after_ms)
