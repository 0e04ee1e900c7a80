"""Runs rows against a cache as the scheduler would, in few words."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.types import Subject, View
from services.scheduler.cache.config import CacheConfig, PrivacyProfile
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.types import Visibility

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.types import Sharing
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.tiers.config import HostConfig
    from services.scheduler.cache.types import Insertion, PrefixLock

ANN = View(Subject("tenant", "ann"))
BOB = View(Subject("tenant", "bob"))
CID = View(Subject("tenant", "cid"))
DAN = View(Subject("tenant", "dan"))
EVE = View(Subject("tenant", "eve"))

# One user may fill a small tier, and nothing is freed ahead of need.
PLAIN = CacheConfig(quota_share=1.0, floor_share=0.0, tenant_floor_share=0.0, headroom_share=0.0)
_CONSTANTS = {field.name for field in fields(PrivacyProfile)}


def with_rules(config: CacheConfig, **changes: Any) -> CacheConfig:
    """Return `config` with other rules, and other constants of its privacy profile."""
    constants = {name: changes.pop(name) for name in _CONSTANTS & changes.keys()}
    return replace(config, profile=replace(config.profile, **constants), **changes)


def int32(values: object) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(slots=True, eq=False)
class Row:
    lock: PrefixLock
    ids: np.ndarray
    table: np.ndarray


class Driver:
    """Rows over one cache, of which nothing goes ahead of need unless `config` says so."""

    def __init__(
        self,
        name: CacheName = "isolated",
        *,
        capacity: int = 64,
        page_size: int = 2,
        config: CacheConfig = PLAIN,
        sharing_of: Callable[[str], Sharing] | None = None,
        host: HostConfig | None = None,
    ) -> None:
        self.allocator = PageAllocator(capacity)
        choices = SharingChoices(sharing_of)
        self.cache: PrefixCache = make_cache(name, self.allocator, page_size, config, host, choices)

    def admit(self, view: View, ids: list[int], *, may_use_cache: bool = True, **options: Any) -> Row:
        array = int32(ids)
        cache = self.cache
        lock = cache.commit(view, array, **options) if may_use_cache else cache.commit_nothing(view)
        missing = -(-len(ids) // self.cache.page_size) - len(lock.pages)
        if missing > self.allocator.free_pages:
            self.cache.evict(missing - self.allocator.free_pages)
        fresh = self.allocator.try_allocate(missing)
        assert fresh is not None
        return Row(lock, array, np.concatenate([lock.pages, fresh]))

    def insert(self, row: Row, tokens: int | None = None, *, prompt_tokens: int | None = None) -> Insertion:
        prompt_tokens = len(row.ids) if prompt_tokens is None else prompt_tokens
        insertion = self.cache.insert(row.lock, row.ids[:tokens], row.table, prompt_tokens)
        row.lock = insertion.lock
        return insertion

    def end(self, row: Row) -> None:
        self.cache.release(row.lock)
        self.allocator.release(row.table)

    def serve(self, view: View, ids: list[int], *, prompt_tokens: int | None = None, **options: Any) -> int:
        """Run a row from admission to its end; return how many of its tokens were cached."""
        row = self.admit(view, ids, **options)
        cached = row.lock.matched_tokens
        self.insert(row, prompt_tokens=prompt_tokens)
        self.end(row)
        return cached

    def next_epoch(self, epochs: int = 1) -> None:
        self.cache.advance(self.cache.epoch + epochs)

    def peek(self, view: View, ids: list[int]) -> int:
        return self.cache.peek(view, int32(ids))

    def edges(self, view: View | None = None) -> list[list[int]]:
        return [node.token_ids.tolist() for node in self.cache.dump(view)]

    def nodes(self, visibility: Visibility) -> list[list[int]]:
        return [node.token_ids.tolist() for node in self.cache.dump() if node.visibility is visibility]

    @property
    def public(self) -> list[list[int]]:
        return self.nodes(Visibility.PUBLIC)

    @property
    def tenants(self) -> list[list[int]]:
        """What tenants share."""
        return self.nodes(Visibility.TENANT)

    @property
    def radix(self) -> RadixCache:
        assert isinstance(self.cache, RadixCache)
        return self.cache

    def violations(self) -> list[str]:
        return violations(self.radix)

    def check(self, *rows: Row) -> None:
        """Nothing is wrong with the tree, and every page reference has a holder."""
        assert self.violations() == []
        assert audit(self.allocator, self.cache, {f"{number}": row.table for number, row in enumerate(rows)}).is_clean
        accounting = account(self.allocator, self.cache, sum(len(row.table) for row in rows))
        assert accounting.is_exact
