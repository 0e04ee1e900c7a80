"""Tenants' sharing choices, as read by the cache and recorded in a decision log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable


class SharingChoices:
    """Reads tenants' choices from `sharing_of` and reports them to an observer, as a replay has to repeat them.

    The cache reads a choice when it opens a tenant's account, at each epoch boundary, and for storage lookups.
    """

    def __init__(self, sharing_of: Callable[[str], Sharing] | None = None) -> None:
        """`sharing_of` maps a tenant's name to its choice; by default every tenant shares within itself."""
        self._sharing_of = sharing_of
        # Receives each choice, within the operation that reads it.
        self.observer: Callable[[str, Sharing], None] | None = None

    def of(self, tenant: str) -> Sharing:
        """Return a tenant's current choice."""
        choice = Sharing.TENANT if self._sharing_of is None else self._sharing_of(tenant)
        if self.observer is not None:
            self.observer(tenant, choice)
        return choice
