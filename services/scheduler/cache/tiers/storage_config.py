"""Constants of the storage tier as the scheduler sees it, and what it needs from outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.cache.object_keys import ObjectKeys
    from services.scheduler.cache.types import Scope


class PrefetchPolicy(Enum):
    """How long a request waits for its pages from storage.

    OFF: they are not looked up. BEST_EFFORT: not at all; what has come when it could start is used. TIMEOUT: up to
    `wait_s` from then on. WAIT_COMPLETE: until it is known how much there is, and all of that has come.
    """

    OFF = "off"
    BEST_EFFORT = "best_effort"
    TIMEOUT = "timeout"
    WAIT_COMPLETE = "wait_complete"


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Rules of the storage tier."""

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    # A request that would start otherwise waits at most so long under TIMEOUT.
    wait_s: float = 0.5
    # A shorter run of missing pages is computed sooner than looked up.
    min_pages: int = 4
    # Pages under way at the same time, writes at most half of them; they can leave neither tier meanwhile.
    window_pages: int = 1024
    # Rate of reading; 0: no limit.
    pages_per_s: float = 0.0
    # Whether what has been copied to the host is stored.
    writes: bool = True


class PageNames(Protocol):
    """Knows the names and keys of pages in storage, and destroys keys."""

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        """Return names and key of pages of `scope` by their chained hashes."""

    def revoke(self, scope: Scope) -> None:
        """Make everything that was stored for `scope`, or for another view of the same subject, unreadable."""
