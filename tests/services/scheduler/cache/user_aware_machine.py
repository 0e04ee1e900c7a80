"""Random lives of several users' rows over the user-aware cache, side by side with the oracle of views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.types import Sharing, Subject, View
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import encode, encode_header, replay
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.types import NodeState, Visibility, scope_of
from tests.services.scheduler.cache.driver import int32, with_rules
from tests.services.scheduler.cache.view_oracle import Entry, Held, Path, ViewOracle

if TYPE_CHECKING:
    from services.scheduler.cache.debug.decisions import Decision
    from services.scheduler.cache.types import PrefixLock

PAGE_SIZE = 2
# Three subjects of one tenant, one of them in two views, two of another, and two tenants with a single one.
USERS = tuple(
    View(Subject(tenant, name), salt)
    for tenant, name, salt in (
        ("acme", "user/ann", ""),
        ("acme", "user/bob", ""),
        ("acme", "user/cid", ""),
        ("blue", "key/dan", ""),
        ("blue", "key/eve", ""),
        ("acme", "user/ann", "salt"),
        ("cyan", "key/fay", ""),
        ("dust", "key/gus", ""),
    )
)
TENANTS = ("acme", "blue", "cyan", "dust")
SESSIONS = (None, None, "one", "other")

users = st.sampled_from(USERS)
# Few distinct prompts, so that users meet; the long ones share a stem, as with a system prompt.
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.lists(st.integers(0, 1), max_size=5).map(lambda tail: [0, 0, 0, 0, *tail, 1]),
)
picks = st.integers(0, 1000)
configs = st.builds(
    with_rules,
    st.just(CacheConfig()),
    promotion_subjects=st.sampled_from([1, 2, 2, 2, 3]),
    share_across_tenants=st.booleans(),
    promotion_epochs=st.integers(0, 3),
    hit_min=st.integers(1, 3),
    diversity_min=st.sampled_from([0.4, 1.0]),
    jump_factor=st.sampled_from([1, 10]),
    demotion_quarantines=st.integers(1, 2),
    quota_share=st.sampled_from([0.3, 1.0]),
    floor_share=st.sampled_from([0.0, 0.1]),
    headroom_share=st.sampled_from([0.0, 0.2]),
    active_epochs=st.integers(0, 2),
    strict_numerics=st.booleans(),
    continuation_limit=st.just(1_000_000),
)


@dataclass(slots=True, eq=False)
class Row:
    user: View
    ids: list[int]
    prompt_tokens: int
    computed: int
    lock: PrefixLock
    table: list[int]
    # None for a row that may not use the cache.
    held: Held | None
    may_promote: bool
    session: str | None = None


class UserAwareMachine(RuleBasedStateMachine):
    @initialize(config=configs, capacity=st.sampled_from([24, 60]))
    def start(self, config: CacheConfig, capacity: int) -> None:
        self.allocator = PageAllocator(capacity)
        self.wanted: dict[str, Sharing] = {}
        self.sharing: dict[str, Sharing] = {}
        choices = SharingChoices(lambda tenant: self.sharing.get(tenant, Sharing.TENANT))
        self.tree = RadixCache(self.allocator, PAGE_SIZE, config, None, choices)
        self.log = [encode_header("user_aware", PAGE_SIZE, capacity, config)]
        self.cache = RecordedCache(self.tree, self.allocator, self.record, choices)
        self.oracle = ViewOracle(config, PAGE_SIZE)
        self.rows: list[Row] = []
        # The tokens whose KV each page holds, all from the first on: what attention would read.
        self.content: dict[int, Path] = {}

    def record(self, decision: Decision) -> None:
        self.log.append(encode(len(self.log), decision))

    @rule(
        user=users,
        ids=prompts,
        cache_mode=st.sampled_from(["use", "use", "use", "use", "private", "none"]),
        session=st.sampled_from(SESSIONS),
    )
    def admit(
        self, user: View, ids: list[int], cache_mode: str, session: str | None = None, *, repeated: bool = False
    ) -> None:
        view = user
        held = None
        if cache_mode == "none":
            lock = self.cache.commit_nothing(view)
        else:
            held = self.oracle.commit(scope_of(user), ids, repeated=repeated, session=session)
            may_promote = cache_mode == "use"
            lock = self.cache.commit(view, int32(ids), repeated=repeated, may_promote=may_promote, session=session)
        assert lock.matched_tokens == (held.length if held else 0)
        row = Row(
            user, ids, len(ids), lock.matched_tokens, lock, lock.pages.tolist(), held, cache_mode == "use", session
        )
        self.rows.append(row)
        if not self.grow(row):
            self.end(row)

    @rule(user=users, ids=prompts, generated=st.lists(st.integers(0, 1), max_size=4))
    def serve(self, user: View, ids: list[int], generated: list[int]) -> None:
        before = len(self.rows)
        self.admit(user, ids, "use")
        if len(self.rows) > before:
            row = self.rows[-1]
            self.compute(row, len(ids))
            self.insert(row, goes_on=True)
            row.ids = ids + generated
            if self.grow(row):
                self.compute(row, len(row.ids))
            self.insert(row, goes_on=False)
            self.end(row)

    @rule(ids=prompts, times=st.integers(1, 4))
    def share(self, ids: list[int], times: int) -> None:
        for user in USERS[:times]:
            self.serve(user, ids, [])

    @rule(user=users, ids=prompts, times=st.integers(2, 4))
    def probe(self, user: View, ids: list[int], times: int) -> None:
        for _ in range(times):
            self.admit(user, ids, "use")
            self.end_last(user)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        """Start another choice of a request that runs."""
        row = self.rows[pick % len(self.rows)]
        mode = "none" if row.held is None else "use" if row.may_promote else "private"
        self.admit(row.user, row.ids[: row.prompt_tokens], mode, row.session, repeated=True)

    @precondition(lambda self: self.rows)
    @rule(pick=picks, tokens=st.integers(1, 6))
    def prefill(self, pick: int, tokens: int) -> None:
        row = self.rows[pick % len(self.rows)]
        self.compute(row, min(len(row.ids), row.computed + tokens))
        self.insert(row, goes_on=True)

    @precondition(lambda self: self.rows)
    @rule(pick=picks, generated=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def decode(self, pick: int, generated: list[int]) -> None:
        row = self.rows[pick % len(self.rows)]
        row.ids = row.ids + generated
        if self.grow(row):
            self.compute(row, len(row.ids))
        else:
            self.preempt(pick)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        row = self.rows[pick % len(self.rows)]
        self.insert(row, goes_on=False)
        self.end(row)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        row = self.rows[pick % len(self.rows)]
        self.insert(row, goes_on=False)
        self.end(row)
        self.admit(row.user, row.ids, "none" if row.held is None else "use", row.session, repeated=True)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.end(self.rows[pick % len(self.rows)])

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        free = self.allocator.free_pages
        assert self.cache.evict(pages) == self.allocator.free_pages - free
        self.adopt()

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        self.adopt()
        assert self.oracle.entries() == self.oracle.locked()

    @rule(user=users, session=st.sampled_from(SESSIONS))
    def forget(self, user: View, session: str | None) -> None:
        self.oracle.forget(scope_of(user)[:2], session)
        self.cache.forget(user.subject, session)

    @rule(ids=prompts)
    def pin(self, ids: list[int]) -> None:
        assert self.cache.pin(int32(ids)) == self.oracle.pin(ids)

    @rule(ids=prompts)
    def unpin(self, ids: list[int]) -> None:
        assert self.cache.unpin(int32(ids)) == self.oracle.unpin(ids)

    @rule(tenant=st.sampled_from(TENANTS), sharing=st.sampled_from(Sharing))
    def choose(self, tenant: str, sharing: Sharing) -> None:
        """Change how far a tenant shares, from the next epoch on."""
        self.wanted[tenant] = sharing

    @rule(ids=prompts, probers=st.lists(st.sampled_from([6, 7, 6, 7, 2, 5]), max_size=4), times=st.integers(1, 4))
    def cross(self, ids: list[int], probers: list[int], times: int) -> None:
        """Let two tenants share a text globally, and some look for it."""
        for tenant in TENANTS[:2]:
            self.choose(tenant, Sharing.GLOBAL)
        for user in (USERS[0], USERS[1], USERS[3], USERS[4]):
            self.serve(user, ids, [])
        self.next_epoch(1)
        for prober in probers:
            self.probe(USERS[prober], [*ids, 1, 1], times)
        self.next_epoch(1)

    @rule(epochs=st.sampled_from([1, 1, 1, 1, 2, 5]))
    def next_epoch(self, epochs: int) -> None:
        soft = {entry for entry, is_soft in self.entries().items() if is_soft}
        self.sharing.update(self.wanted)
        self.oracle.advance(self.oracle.epoch + epochs, soft, self.sharing)
        self.cache.advance(self.cache.epoch + epochs)

    @rule()
    def reach_boundary(self) -> None:
        """Share what has enough evidence, within an epoch."""
        self.oracle.reach_boundary()
        self.cache.share()

    # --- a row's steps ---

    def grow(self, row: Row) -> bool:
        """Give the row pages for all its ids, evicting as needed."""
        missing = -(-len(row.ids) // PAGE_SIZE) - len(row.table)
        if missing > self.allocator.free_pages:
            available = self.allocator.free_pages + self.cache.soft_free_pages + self.cache.evictable_pages
            self.cache.evict(missing - self.allocator.free_pages)
            self.adopt()
            assert (missing <= self.allocator.free_pages) == (missing <= available)
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
        row.computed = max(row.computed, end)

    def insert(self, row: Row, *, goes_on: bool) -> None:
        ids = row.ids[: row.computed]
        insertion = self.cache.insert(row.lock, int32(ids), int32(row.table), row.prompt_tokens)
        row.lock = insertion.lock
        if row.held is None or row.held.is_closed:
            assert not len(insertion.duplicates)
            return
        self.oracle.insert(row.held, ids, row.prompt_tokens, may_promote=row.may_promote)
        if goes_on and insertion.first_duplicate is not None:
            first = insertion.first_duplicate
            before = list(row.table)
            row.table[first : len(insertion.pages)] = insertion.pages[first:].tolist()
            self.allocator.exchange(insertion.duplicates, insertion.canonical)
            known = set(insertion.duplicates.tolist())
            assert {old for old, new in zip(before, row.table, strict=True) if old != new} >= known

    def end(self, row: Row) -> None:
        self.rows.remove(row)
        self.allocator.release(int32(row.table))
        self.cache.release(row.lock)
        if row.held is not None:
            self.oracle.release(row.held)

    def end_last(self, user: View) -> None:
        if self.rows and self.rows[-1].user == user:
            self.end(self.rows[-1])

    # --- comparison ---

    def entries(self) -> dict[Entry, bool]:
        """Return what the cache holds, page by page, and whether it is soft-free."""
        held: dict[Entry, bool] = {}
        tokens_above: dict[int, Path] = {}
        for node in self.cache.dump():
            above = () if node.parent_id is None else tokens_above[node.parent_id]
            tokens = above + tuple(node.token_ids.tolist())
            tokens_above[node.node_id] = tokens
            assert len(tokens) == node.depth_tokens
            assert (node.owner is not None) == (node.visibility is Visibility.PRIVATE)
            assert (node.tenant is not None) == (node.visibility is Visibility.TENANT)
            owner = scope_of(node.owner) if node.owner else (node.tenant,) if node.tenant else ()
            for number, page in enumerate(node.pages.tolist(), 1):
                path = tokens[: len(above) + number * PAGE_SIZE]
                held[owner, path] = node.state is NodeState.SOFT_FREE
                assert self.content[page] == path, "the page holds what the node says"
        return held

    def standing(self) -> dict[Entry, tuple[object, ...]]:
        """Return, page by page, what a private node is evidence of and how a shared one is used."""
        found: dict[Entry, tuple[object, ...]] = {}
        for node, depth in self.tree.store.tree.walk():
            tokens = tuple(np.frombuffer(self.tree.store.tree.path_key(node), np.int32).tolist())
            facts: tuple[object, ...] = (node.prompt_epoch, node.no_promote, node.generation, node.sessions)
            if node.is_shared:
                creators = {who: (made.epoch, set(made.salts)) for who, made in (node.creators or {}).items()}
                is_current = node.epoch == self.tree.epoch
                hidden = (node.quarantined or {}).values()
                facts = (
                    creators,
                    node.hit_cur if is_current else 0,
                    node.generation,
                    node.pinned,
                    sum(not one.is_whole for one in hidden),
                    {one.tenant for one in hidden if one.is_whole},
                    set(node.tenants or ()),
                )
            for number in range(len(node.pages)):
                found[node.owner_id, tokens[: (depth - number) * PAGE_SIZE]] = facts
        return found

    def adopt(self) -> None:
        """Let the oracle drop what the cache has evicted, if it was free to."""
        gone = self.oracle.entries() - self.entries().keys()
        assert not gone & self.oracle.locked()
        self.oracle.drop(gone)

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert not (found := violations(self.tree)), found
        cached, expected = self.entries().keys(), self.oracle.entries()
        assert not cached ^ expected, (cached - expected, expected - cached)
        assert self.standing() == self.oracle.standing()
        for user in USERS:
            for path in {path for _, path in self.oracle.entries()} | {(0,) * 5}:
                for probe in ([*path, 0], [*path, 1]):
                    length = self.oracle.match(scope_of(user), probe)
                    assert self.cache.peek(user, int32(probe)) == length

    @invariant()
    def rows_read_their_own_tokens(self) -> None:
        for row in getattr(self, "rows", []):
            for index in range(row.computed // PAGE_SIZE):
                assert self.content[row.table[index]] == tuple(row.ids[: (index + 1) * PAGE_SIZE])

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        if not hasattr(self, "cache"):
            return
        tables = {f"{number}": int32(row.table) for number, row in enumerate(self.rows)}
        assert audit(self.allocator, self.cache, tables).is_clean
        accounting = account(self.allocator, self.cache, sum(len(table) for table in tables.values()))
        assert accounting.is_exact
        in_use = {page for row in self.rows for page in row.table}
        in_use.update(page for node in self.cache.dump() if node.lock_ref for page in node.pages.tolist())
        assert accounting.protected == len(in_use)
        assert accounting.free + accounting.soft_free + accounting.evictable + len(in_use) == accounting.capacity

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for row in list(self.rows):
            self.end(row)
        self.cache.flush()
        assert self.allocator.free_pages == self.allocator.capacity
        assert len(self.tree.store.accounts) == len(self.tree.store.accounts.tenants()) == 0
        assert replay(self.log).difference is None
