"""Random lives of several users' rows: the tree does what the naive oracle does, and no page is lost or overwritten."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.types import Subject, View
from services.scheduler.cache.config import Mode
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from tests.examples import examples
from tests.services.scheduler.cache.driver import PLAIN
from tests.services.scheduler.cache.oracle import NaiveCache, Path

if TYPE_CHECKING:
    from services.scheduler.cache.types import PrefixLock

PAGE_SIZE = 2
CAPACITY = 30

users = st.sampled_from(["ann", "bob", "cid"])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
picks = st.integers(0, 1000)


@dataclass(slots=True, eq=False)
class Row:
    user: str
    ids: list[int]
    prompt_tokens: int
    computed: int
    lock: PrefixLock
    table: list[int]
    # What the oracle has locked for it; None for a row that may not use the cache.
    locked: list[Path] | None


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


class CacheMachine(RuleBasedStateMachine):
    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY)
        mode = Mode.SHARED if self.shared else Mode.ISOLATED
        self.cache = RadixCache(self.allocator, PAGE_SIZE, replace(PLAIN, mode=mode))
        self.oracle = NaiveCache(PAGE_SIZE, self.shared)
        self.rows: list[Row] = []
        # The tokens whose KV each page holds, all from the first on: what attention would read.
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(user=users, ids=prompts, may_use_cache=st.sampled_from([True, True, True, False]))
    def admit(self, user: str, ids: list[int], may_use_cache: bool) -> None:
        view = View(Subject("tenant", user))
        if may_use_cache:
            locked = self.oracle.matched(user, ids)
            lock = self.cache.commit(view, int32(ids))
            assert lock.pages.tolist() == self.oracle.pages(locked)
            self.oracle.lock(locked)
        else:
            locked = None
            lock = self.cache.commit_nothing(view)
            assert lock.matched_tokens == 0
        row = Row(user, ids, len(ids), lock.matched_tokens, lock, lock.pages.tolist(), locked)
        self.rows.append(row)
        if not self.grow(row):
            self.end(row)

    @rule(user=users, ids=prompts)
    def serve(self, user: str, ids: list[int]) -> None:
        rows = len(self.rows)
        self.admit(user, ids, may_use_cache=True)
        if len(self.rows) > rows:
            self.compute(self.rows[-1], len(ids))
            self.finish(-1)

    @precondition(lambda self: self.rows)
    @rule(pick=picks, tokens=st.integers(1, 6), repoint=st.booleans())
    def prefill(self, pick: int, tokens: int, repoint: bool) -> None:
        row = self.rows[pick % len(self.rows)]
        self.compute(row, min(len(row.ids), row.computed + tokens))
        self.insert(row, repoint=repoint)

    @precondition(lambda self: self.rows)
    @rule(pick=picks, generated=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def decode(self, pick: int, generated: list[int]) -> None:
        row = self.rows[pick % len(self.rows)]
        row.ids = row.ids + generated
        if self.grow(row):
            self.compute(row, len(row.ids))
        else:
            self.insert(row, repoint=False)
            self.end(row)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        row = self.rows[pick % len(self.rows)]
        self.insert(row, repoint=False)
        self.end(row)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.end(self.rows[pick % len(self.rows)])

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        assert self.cache.evict(pages) == self.oracle.evict(pages)

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() == self.oracle.evict(CAPACITY)

    def grow(self, row: Row) -> bool:
        """Give the row pages for all its ids, evicting as needed."""
        missing = -(-len(row.ids) // PAGE_SIZE) - len(row.table)
        if missing > self.allocator.free_pages:
            shortage = missing - self.allocator.free_pages
            assert self.cache.evict(shortage) == self.oracle.evict(shortage)
        pages = self.allocator.try_allocate(missing)
        if pages is None:
            return False
        for page in pages.tolist():
            self.content.pop(page, None)
        row.table += pages.tolist()
        return True

    def compute(self, row: Row, end: int) -> None:
        for position in range(row.computed, end):
            self.content[row.table[position // PAGE_SIZE]] = tuple(row.ids[: position + 1])
        row.computed = end

    def insert(self, row: Row, *, repoint: bool) -> None:
        before = list(row.table)
        insertion = self.cache.insert(row.lock, int32(row.ids[: row.computed]), int32(row.table), row.prompt_tokens)
        row.lock = insertion.lock
        if row.locked is None:
            assert insertion.pages.tolist() == row.table[: row.computed // PAGE_SIZE]
            assert not len(insertion.duplicates)
            return
        row.locked = self.oracle.insert(row.user, row.ids[: row.computed], before, row.locked)
        assert insertion.pages.tolist() == self.oracle.pages(row.locked)
        if repoint and insertion.first_duplicate is not None:
            first = insertion.first_duplicate
            row.table[first : len(insertion.pages)] = insertion.pages[first:].tolist()
            changed = [(old, new) for old, new in zip(before, row.table, strict=True) if old != new]
            assert changed == list(zip(insertion.duplicates.tolist(), insertion.canonical.tolist(), strict=True))
            assert self.allocator.exchange(insertion.duplicates, insertion.canonical) == len(insertion.duplicates)

    def end(self, row: Row) -> None:
        self.rows.remove(row)
        self.allocator.release(int32(row.table))
        self.cache.release(row.lock)
        if row.locked is not None:
            self.oracle.release(row.locked)

    @invariant()
    def tree_is_sound(self) -> None:
        assert violations(self.cache) == []

    @invariant()
    def tree_holds_what_the_oracle_holds(self) -> None:
        held: dict[Path, int] = {}
        tokens_above: dict[int, tuple[int, ...]] = {}
        for node in self.cache.dump():
            above = () if node.parent_id is None else tokens_above[node.parent_id]
            tokens = above + tuple(node.token_ids.tolist())
            tokens_above[node.node_id] = tokens
            assert len(tokens) == node.depth_tokens
            assert node.edge_tokens == len(node.token_ids) == len(node.pages) * PAGE_SIZE
            scope = () if node.owner is None else (node.owner.tenant, node.owner.subject.name)
            for number, page in enumerate(node.pages.tolist(), 1):
                held[scope, tokens[: len(above) + number * PAGE_SIZE]] = page
        assert held == {path: entry.page for path, entry in self.oracle.entries.items()}

    @invariant()
    def every_view_matches_as_the_oracle_does(self) -> None:
        for user in ("ann", "bob", "cid", "dan"):
            for ids in [*(list(tokens) for _, tokens in self.oracle.entries), [0] * 5, [1]]:
                for probe in (ids, [*ids, 0], ids[:-1]):
                    expected = len(self.oracle.matched(user, probe)) * PAGE_SIZE
                    assert self.cache.peek(View(Subject("tenant", user)), int32(probe)) == expected

    @invariant()
    def every_page_holds_what_its_holders_believe(self) -> None:
        for row in self.rows:
            for index in range(row.computed // PAGE_SIZE):
                assert self.content[row.table[index]] == tuple(row.ids[: (index + 1) * PAGE_SIZE])
        for (_, tokens), entry in self.oracle.entries.items():
            assert self.content[entry.page] == tokens

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        tables = {f"{number}": int32(row.table) for number, row in enumerate(self.rows)}
        assert audit(self.allocator, self.cache, tables).is_clean
        accounting = account(self.allocator, self.cache, sum(len(table) for table in tables.values()))
        assert accounting.is_exact
        assert self.cache.protected_pages <= accounting.protected

    def teardown(self) -> None:
        for row in list(self.rows):
            self.end(row)
        self.cache.flush()
        assert self.allocator.free_pages == CAPACITY


class SharedCacheMachine(CacheMachine):
    shared = True


TestIsolated = CacheMachine.TestCase
TestShared = SharedCacheMachine.TestCase
TestIsolated.settings = examples(50, stateful_step_count=50)
TestShared.settings = examples(25, stateful_step_count=50)
