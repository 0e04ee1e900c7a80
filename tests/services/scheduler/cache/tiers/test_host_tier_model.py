"""Random changes of a tree over two tiers while copies are under way: nothing is lost, mixed up or counted wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.transfers import Transfer, TransferAck, TransferDirection
from common.types import Subject, View
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.sharing.demotion import Demoter
from services.scheduler.cache.sharing.fleet import FleetLedger
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.cache.types import NodeState, PrefixLock
from tests.examples import examples
from tests.services.scheduler.cache.driver import PLAIN

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.tiers.host_pages import HostHold
    from services.scheduler.cache.tiers.host_tier import HostTier

PAGE_SIZE = 2
CAPACITY = 24
USERS = st.sampled_from(["ann", "bob", "cid"])
PROMPTS = st.builds(
    lambda stem, length, tail: [stem * 50 + i for i in range(length)] + tail,
    st.integers(0, 1),
    st.sampled_from([4, 8, 12]),
    st.lists(st.integers(0, 1), max_size=2),
)

# How often something happens at once, and how often what destroys much happens at all.
OFTEN = st.sampled_from([True, True, False])
RARELY = st.sampled_from([False, False, False, False, True])

Content = tuple[int, ...]


class HostTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache: RadixCache
        # The tokens whose KV each page holds, all from the first on.
        self.device: dict[int, Content] = {}
        self.hosted: dict[int, Content] = {}
        self.open: dict[int, Transfer] = {}
        self.rows: list[tuple[PrefixLock, list[int], PageIds]] = []
        self.holds: list[HostHold] = []

    @initialize(host_pages=st.integers(1, 30), policy=st.sampled_from(WritePolicy), quota=st.sampled_from([0.2, 1.0]))
    def start(self, host_pages: int, policy: WritePolicy, quota: float) -> None:
        self.allocator = PageAllocator(CAPACITY)
        rules = replace(PLAIN, promotion_subjects=2, quota_share=quota)
        host = HostConfig(pages=host_pages, policy=policy, window_pages=6, reserve_share=0.5)
        self.cache = RadixCache(self.allocator, PAGE_SIZE, rules, host)

    @property
    def tier(self) -> HostTier:
        assert self.cache.host is not None
        return self.cache.host

    def allocate(self, count: int) -> PageIds | None:
        if count > self.allocator.free_pages:
            self.cache.evict(count - self.allocator.free_pages)
        pages = self.allocator.try_allocate(count)
        for page in [] if pages is None else pages.tolist():
            self.device.pop(page, None)
        return pages

    @rule(user=USERS, ids=PROMPTS, private=st.booleans(), stays=st.sampled_from([False, False, True]))
    def serve(self, user: str, ids: list[int], private: bool, stays: bool) -> None:
        array = np.array(ids, np.int32)
        lock = self.cache.commit(View(Subject("tenant", user)), array, may_promote=not private)
        for index, page in enumerate(lock.pages.tolist()):
            assert self.device[page] == tuple(ids[: (index + 1) * PAGE_SIZE])
        fresh = self.allocate(-(-len(ids) // PAGE_SIZE) - len(lock.pages))
        if fresh is None:
            self.cache.release(lock)
            self.allocator.release(lock.pages)
            return
        table = np.concatenate([lock.pages, fresh])
        for index, page in enumerate(table.tolist()):
            self.device[page] = tuple(ids[: (index + 1) * PAGE_SIZE])
        lock = self.cache.insert(lock, array, table, len(ids)).lock
        self.rows.append((lock, ids, table))
        if not stays or len(self.rows) > 2:
            self.end()

    @rule(users=st.lists(USERS, min_size=1, max_size=3), ids=PROMPTS, evicted=st.integers(0, 24))
    def serve_several(self, users: list[str], ids: list[int], evicted: int) -> None:
        """Have users ask the same, and their pages copied before some have to go."""
        for user in users:
            self.serve(user, ids, private=False, stays=False)
        self.back_up(at_once=True)
        self.cache.evict(evicted)

    @rule()
    def end(self) -> None:
        if self.rows:
            lock, _, table = self.rows.pop()
            self.cache.release(lock)
            self.allocator.release(table)

    @rule(user=USERS, ids=PROMPTS, at_once=OFTEN)
    def load(self, user: str, ids: list[int], at_once: bool) -> None:
        array = np.array([*ids, 99], np.int32)
        match = self.tier.find(View(Subject("tenant", user)), array)
        assert match.device_tokens == self.cache.peek(View(Subject("tenant", user)), array)
        if match.host_tokens and match.loading is None:
            transfer = self.tier.load(View(Subject("tenant", user)), array, self.allocate)
            if transfer is not None:
                assert transfer.pages * PAGE_SIZE == match.host_tokens
                for index, page in enumerate(transfer.host_pages.tolist(), match.device_tokens // PAGE_SIZE):
                    assert self.hosted[page] == tuple(array.tolist()[: (index + 1) * PAGE_SIZE])
                self.begin(transfer, at_once)

    @rule(at_once=OFTEN)
    def back_up(self, at_once: bool) -> None:
        for transfer in self.tier.plan_backups():
            self.begin(transfer, at_once)

    def begin(self, transfer: Transfer, at_once: bool) -> None:
        self.open[transfer.transfer_id] = transfer
        if at_once:
            self.finish(transfer.transfer_id)

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if self.open:
            self.finish(data.draw(st.sampled_from(sorted(self.open))))

    def finish(self, transfer_id: int) -> None:
        transfer = self.open.pop(transfer_id)
        for device, host in zip(transfer.device_pages.tolist(), transfer.host_pages.tolist(), strict=True):
            if transfer.direction is TransferDirection.DEVICE_TO_HOST:
                self.hosted[host] = self.device[device]
            else:
                self.device[device] = self.hosted[host]
        assert self.tier.finish(TransferAck(transfer.transfer_id, transfer.pages), 0.0) is transfer

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        self.cache.evict(pages)

    @rule()
    def next_epoch(self) -> None:
        self.cache.advance(self.cache.epoch + 1)

    @rule(user=USERS, really=RARELY)
    def forget(self, user: str, really: bool) -> None:
        if really:
            self.cache.forget(Subject("tenant", user))

    @rule(really=RARELY)
    def flush(self, really: bool) -> None:
        if really:
            self.cache.flush()

    @rule(data=st.data(), really=RARELY)
    def demote(self, data: st.DataObject, really: bool) -> None:
        shared = [node for node, _ in self.cache.store.tree.walk() if node.is_shared]
        if shared and really:
            node = data.draw(st.sampled_from(shared))
            Demoter(self.cache.store, self.cache.locks, FleetLedger(self.cache.store)).demote(node)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        copied = [node for node, _ in self.cache.store.tree.walk() if node.host_pages is not None]
        if copied:
            self.holds.append(self.tier.pages.hold(data.draw(st.sampled_from(copied))))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.holds:
            self.tier.pages.release(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @rule(really=RARELY)
    def lose_workers(self, really: bool) -> None:
        if really:
            self.end_all()

    def end_all(self) -> None:
        while self.rows:
            self.end()
        while self.holds:
            self.tier.pages.release(self.holds.pop())
        self.tier.forget_all()
        self.cache.flush()
        self.open.clear()
        self.device.clear()
        self.hosted.clear()
        assert self.allocator.free_pages == CAPACITY
        assert self.tier.pages.allocator.free_pages == self.tier.config.pages

    @invariant()
    def both_tiers_are_sound(self) -> None:
        if not hasattr(self, "allocator"):
            return
        assert violations(self.cache) == []
        tables = {f"{index}": table for index, (_, _, table) in enumerate(self.rows)}
        assert audit(self.allocator, self.cache, tables | self.tier.ledger.tables()).is_clean
        references = sum(map(len, tables.values())) + self.tier.ledger.device_references
        assert account(self.allocator, self.cache, references).is_exact

    @invariant()
    def every_page_holds_what_its_node_says(self) -> None:
        if not hasattr(self, "allocator"):
            return
        above: dict[int, Content] = {}
        for node in self.cache.dump():
            before = above.get(node.parent_id, ()) if node.parent_id is not None else ()
            tokens = before + tuple(node.token_ids.tolist())
            above[node.node_id] = tokens
            ends = range(len(before) + PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)
            if node.state is not NodeState.ON_HOST:
                assert [self.device[page] for page in node.pages.tolist()] == [tokens[:end] for end in ends]
            if node.host_pages is not None:
                assert [self.hosted[page] for page in node.host_pages.tolist()] == [tokens[:end] for end in ends]

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self.end_all()


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = examples(25, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps() -> None:
    run_state_machine_as_test(
        HostTierMachine, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None)
    )
