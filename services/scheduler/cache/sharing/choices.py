"""How far tenants share, as the cache asks for it and a decision log records it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable


class SharingChoices:
    """Asks `sharing_of` for tenants' choices and reports the answers, which a replay has to repeat.

    The cache asks when it opens a tenant's account, at each epoch boundary, and for storage look-ups.
    """

    def __init__(self, sharing_of: Callable[[str], Sharing] | None = None) -> None:
        """Ask `sharing_of` with a tenant's name; absent: every tenant shares within itself."""
        self._sharing_of = sharing_of
        # Is told each answer, within the operation that asked.
        self.observer: Callable[[str, Sharing], None] | None = None

    def of(self, tenant: str) -> Sharing:
        """Return a tenant's choice now."""
        choice = Sharing.TENANT if self._sharing_of is None else self._sharing_of(tenant)
        if self.observer is not None:
            self.observer(tenant, choice)
        return choice
