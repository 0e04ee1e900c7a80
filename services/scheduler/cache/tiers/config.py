"""All constants of the host and storage tiers, with their defaults and reasons, and the names of stored pages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from services.scheduler.cache.object_keys import ObjectKeys
    from services.scheduler.cache.types import Scope


class WritePolicy(Enum):
    """When a node's pages are copied to the host.

    WRITE_THROUGH: when no row uses it any more for the first time. WRITE_THROUGH_SELECTIVE: only after enough uses (of
    a private node, by its owner alone). WRITE_BACK: when the device runs short of pages and the node is among the next
    victims; a node evicted before its copy is made is lost.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Rules of the host tier; with 0 pages there is none."""

    pages: int = 0
    # Slots for copies of snapshots of recurrent states.
    snapshots: int = 0
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    # Under the selective policy: the first use computes a node, the second shows that it is matched again.
    uses: int = 2
    # Pages of backups in flight at the same time: they hold device pages, and loads wait for started ones.
    window_pages: int = 256
    # Under write-back: the share of the device's pages that are free or have a copy, so that they are available at
    # once.
    reserve_share: float = 1 / 16

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        checks = {
            "host pages must not be negative": self.pages >= 0,
            "host uses must be at least 1": self.uses >= 1,
            "the window of backups must hold a page": self.window_pages >= 1,
            "host reserve_share must be in (0, 1]": 0 < self.reserve_share <= 1,
        }
        wrong = [message for message, paths in checks.items() if not paths]
        if wrong:
            raise ConfigurationError("; ".join(wrong))


class PrefetchPolicy(Enum):
    """The wait of a request for its pages from storage.

    OFF: there is no lookup. BEST_EFFORT: it does not wait; pages that have arrived when it could start are used.
    TIMEOUT: up to `wait_s` from then on. WAIT_COMPLETE: until the lookup has ended and all found pages have arrived;
    pages are looked up even if computing them is faster, as it saves work of the device.
    """

    OFF = "off"
    BEST_EFFORT = "best_effort"
    TIMEOUT = "timeout"
    WAIT_COMPLETE = "wait_complete"


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Rules of the storage tier."""

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    # Maximum time under TIMEOUT that a request waits which could start otherwise.
    wait_s: float = 0.5
    # A shorter run of missing pages is faster to compute than to look up.
    min_pages: int = 4
    # Pages in flight at the same time, at most half of them writes; they cannot be evicted from either tier meanwhile.
    window_pages: int = 1024
    # Rate of reading; 0: no limit.
    pages_per_s: float = 0.0
    # Whether copies on the host are stored.
    writes: bool = True


# The scope under which a cache in mode SHARED stores its pages; no view, tenant or public scope has four parts.
_COMMON_SCOPE: Scope = ("", "", "", "shared")


class PageNames(Protocol):
    """Supplies the names and keys of pages in storage, and destroys keys."""

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        """Return names and key of pages of `scope` by their chained hashes."""

    def revoke(self, scope: Scope) -> None:
        """Make all stored pages of `scope`, and of other views of the same subject, unreadable."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context for calls of `keys`, in which new subjects get theirs at less cost than one by one."""


class CommonNames:
    """Names of pages that a cache in mode SHARED stores: in other modes, its one view must not count as public."""

    def __init__(self, names: PageNames) -> None:
        self._names = names

    def keys(self, _scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        return self._names.keys(_COMMON_SCOPE, hashes)

    def revoke(self, _scope: Scope) -> None:
        self._names.revoke(_COMMON_SCOPE)

    def together(self) -> AbstractContextManager[None]:
        return self._names.together()
