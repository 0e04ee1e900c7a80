"""Runs rows against a cache as the scheduler would, in few words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import Principal
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.invariants import violations
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache

if TYPE_CHECKING:
    from services.scheduler.cache.interface import Insertion, Lease, PrefixCache

ANN = Principal("tenant", "ann")
BOB = Principal("tenant", "bob")


def int32(values: object) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(slots=True, eq=False)
class Row:
    lease: Lease
    ids: np.ndarray
    table: np.ndarray


class Driver:
    def __init__(self, name: CacheName = "isolated", *, capacity: int = 64, page_size: int = 2) -> None:
        self.allocator = PageAllocator(capacity)
        self.cache: PrefixCache = make_cache(name, self.allocator, page_size)

    def admit(self, principal: Principal, ids: list[int], *, may_use_cache: bool = True) -> Row:
        array = int32(ids)
        lease = self.cache.commit(principal, array) if may_use_cache else self.cache.commit_nothing(principal)
        fresh = self.allocator.try_allocate(-(-len(ids) // self.cache.page_size) - len(lease.pages))
        assert fresh is not None
        return Row(lease, array, np.concatenate([lease.pages, fresh]))

    def insert(self, row: Row, tokens: int | None = None) -> Insertion:
        insertion = self.cache.insert(row.lease, row.ids[:tokens], row.table, len(row.ids))
        row.lease = insertion.lease
        return insertion

    def end(self, row: Row) -> None:
        self.cache.release(row.lease)
        self.allocator.release(row.table)

    def serve(self, principal: Principal, ids: list[int]) -> int:
        """Run a row from admission to its end; return how many of its tokens were cached."""
        row = self.admit(principal, ids)
        cached = row.lease.matched_tokens
        self.insert(row)
        self.end(row)
        return cached

    def peek(self, principal: Principal, ids: list[int]) -> int:
        return self.cache.peek(principal, int32(ids))

    def edges(self, principal: Principal | None = None) -> list[list[int]]:
        return [node.token_ids.tolist() for node in self.cache.dump(principal)]

    def violations(self) -> list[str]:
        assert isinstance(self.cache, RadixCache)
        return violations(self.cache)
