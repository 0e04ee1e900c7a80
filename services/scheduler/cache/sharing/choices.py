"""Tenants' sharing choices, as recorded in a decision log, and prompts that the operator has declared public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import Sharing
from services.scheduler.cache.keys import TOKEN_BYTES, PagedKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.types import TokenIds


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


class Pins:
    """Owns the pinned prompts. A pin takes effect at the next boundary of sharing, and lasts whether cached or not."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pending: list[bytes] = []
        self._active: dict[bytes, dict[bytes, None]] = {}

    def add(self, token_ids: TokenIds) -> int:
        """Pin a prompt's whole pages; return the number of their tokens."""
        key = self._key(token_ids)
        if key and key not in self._pending and key not in self._siblings(key):
            self._pending.append(key)
        return len(key) // TOKEN_BYTES

    def remove(self, token_ids: TokenIds) -> bool:
        """Undo `add`; return whether there was such a pin."""
        key = self._key(token_ids)
        siblings = self._siblings(key)
        if key in siblings:
            del siblings[key]
            if not siblings:
                del self._active[self._first_page(key)]
            return True
        if key in self._pending:
            self._pending.remove(key)
            return True
        return False

    def activate(self) -> list[bytes]:
        """Activate the pins added since the last boundary; return them."""
        pending, self._pending = self._pending, []
        for key in pending:
            self._active.setdefault(self._first_page(key), {})[key] = None
        return pending

    @property
    def active(self) -> list[bytes]:
        """The pins in effect."""
        return [key for siblings in self._active.values() for key in siblings]

    def covered_pages(self, key: PagedKey) -> int:
        """Return the number of leading pages of a prompt that active pins cover."""
        if not self._active or not key.pages:
            return 0
        pins = self._active.get(key.page(0), {})
        return max((key.common_pages(pin, 0, key.pages) for pin in pins), default=0)

    def _key(self, token_ids: TokenIds) -> bytes:
        key = PagedKey(token_ids, self._page_size)
        return key.slice(0, key.pages)

    def _first_page(self, key: bytes) -> bytes:
        return key[: self._page_size * TOKEN_BYTES]

    def _siblings(self, key: bytes) -> dict[bytes, None]:
        return self._active.get(self._first_page(key), {})
