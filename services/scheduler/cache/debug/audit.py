"""Checks that every page reference has a holder: a cheap check for frequent use, and a full audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.types import Accounting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.types import NodeId


def account(allocator: PageAllocator, cache: PrefixCache, row_references: int) -> Accounting:
    """Return the page accounting of a tier in O(1).

    Args:
        allocator: The tier's allocator.
        cache: The cache over it.
        row_references: Sum of the page tables' lengths of all running rows.
    """
    free, soft_free, evictable = allocator.free_pages, cache.soft_free_pages, cache.evictable_pages
    return Accounting(
        capacity=allocator.capacity,
        free=free,
        soft_free=soft_free,
        evictable=evictable,
        protected=allocator.capacity - free - soft_free - evictable,
        unaccounted_references=allocator.references - cache.held_references - row_references,
    )


@dataclass(frozen=True, slots=True)
class PageFault:
    """A page whose reference count differs from its holders: too high it leaks, too low it may be freed in use.

    `owner` is the tag of its last allocation.
    """

    page: int
    references: int
    rows: tuple[str, ...]
    nodes: tuple[NodeId, ...]
    owner: int

    @property
    def holders(self) -> int:
        """Number of rows and nodes that refer to the page."""
        return len(self.rows) + len(self.nodes)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings of a full audit."""

    leaked: tuple[PageFault, ...]
    dangling: tuple[PageFault, ...]
    is_allocator_consistent: bool

    @property
    def is_clean(self) -> bool:
        """Whether there are no faults."""
        return not self.leaked and not self.dangling and self.is_allocator_consistent


def audit(allocator: PageAllocator, cache: PrefixCache, rows: Mapping[str, PageIds]) -> AuditReport:
    """Recount every page's holders and compare. O(capacity + pages in use).

    Args:
        allocator: The tier's allocator.
        cache: The cache over it.
        rows: Page table of each running row, by a name that is readable in logs.
    """
    expected = _count_holders(allocator, cache, rows)
    wrong = np.flatnonzero(allocator.counts != expected).tolist()
    faults = _describe(wrong, allocator, cache, rows) if wrong else []
    return AuditReport(
        leaked=tuple(fault for fault in faults if fault.references > fault.holders),
        dangling=tuple(fault for fault in faults if fault.references < fault.holders),
        is_allocator_consistent=allocator.is_consistent(),
    )


def repair(allocator: PageAllocator, cache: PrefixCache, tables: Mapping[str, PageIds]) -> int:
    """Make the allocator agree with its holders while no row runs; return the number of pages that became free.

    These are the cache and `tables`, by readable names. A cache that referred to pages counted as free is flushed, as
    they may have been overwritten.
    """
    report = audit(allocator, cache, tables)
    free_before = allocator.free_pages
    if not report.is_clean:
        allocator.restore(_count_holders(allocator, cache, tables))
    if report.dangling:
        cache.flush()
    return allocator.free_pages - free_before


def _count_holders(allocator: PageAllocator, cache: PrefixCache, rows: Mapping[str, PageIds]) -> NDArray[np.int32]:
    tables = [*rows.values(), *(node.pages for node in cache.dump())]
    named = np.concatenate(tables) if tables else np.empty(0, np.int32)
    return np.bincount(named, minlength=allocator.capacity).astype(np.int32)


def _describe(
    pages: list[int], allocator: PageAllocator, cache: PrefixCache, rows: Mapping[str, PageIds]
) -> list[PageFault]:
    naming_rows: dict[int, list[str]] = {page: [] for page in pages}
    naming_nodes: dict[int, list[NodeId]] = {page: [] for page in pages}
    for name, table in rows.items():
        for page in naming_rows.keys() & set(table.tolist()):
            naming_rows[page].append(name)
    for node in cache.dump():
        for page in naming_nodes.keys() & set(node.pages.tolist()):
            naming_nodes[page].append(node.node_id)
    return [
        PageFault(
            page=page,
            references=int(allocator.counts[page]),
            rows=tuple(naming_rows[page]),
            nodes=tuple(naming_nodes[page]),
            owner=allocator.last_owner(page),
        )
        for page in pages
    ]
