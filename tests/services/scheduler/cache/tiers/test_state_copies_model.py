"""Random changes of a tree with snapshots over two tiers, against a model: the texts that have a state somewhere.

The model knows what each page and slot holds. From that alone it says how far a request can continue, on the device and
with what the host has, and who may use what; the cache has to find exactly that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from common.transfers import TransferDirection
from common.types import Subject, View
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.cache.types import PUBLIC_SCOPE
from tests.examples import examples
from tests.services.scheduler.cache.driver import PLAIN
from tests.services.scheduler.cache.tiers.test_host_tier_model import (
    CAPACITY,
    OFTEN,
    PAGE_SIZE,
    PROMPTS,
    RARELY,
    USERS,
    Content,
    HostTierMachine,
)

if TYPE_CHECKING:
    from common.transfers import Transfer
    from common.types import SnapshotSlot
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.state_snapshots import SnapshotEntry, StateSnapshots
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.tiers.state_copies import StateCopies
    from services.scheduler.cache.types import Scope

INTERVAL = 2


def pages_being_read(tier: HostTier) -> set[int]:
    """Return the pages of the host that open loads read."""
    opened = [each.transfer for each in tier.ledger.all()]
    loads = [each for each in opened if each.direction is TransferDirection.HOST_TO_DEVICE]
    return {page for load in loads for page in load.host_pages.tolist()}


class StateCopiesMachine(HostTierMachine):
    def __init__(self) -> None:
        super().__init__()
        # The tokens that the state in each slot has taken in.
        self.device_states: dict[SnapshotSlot, Content] = {}
        self.host_states: dict[SnapshotSlot, Content] = {}
        # By transfer: the states as they were when it began, and the subjects that were forgotten since.
        self.moving: dict[int, list[Content]] = {}

    @initialize(
        host_pages=st.integers(1, 30),
        slots=st.tuples(st.integers(1, 12), st.integers(0, 16)),
        policy=st.sampled_from(WritePolicy),
        quota=st.sampled_from([0.2, 1.0]),
    )
    def start(self, host_pages: int, slots: tuple[int, int], policy: WritePolicy, quota: float) -> None:
        self.allocator = PageAllocator(CAPACITY)
        rules = replace(PLAIN, promotion_subjects=2, quota_share=quota, snapshots=slots[0], snapshot_interval=INTERVAL)
        host = HostConfig(pages=host_pages, snapshots=slots[1], policy=policy, window_pages=6, reserve_share=0.5)
        self.cache = RadixCache(self.allocator, PAGE_SIZE, rules, host)

    @property
    def states(self) -> StateCopies:
        assert self.tier.states is not None
        return self.tier.states

    @property
    def snapshots(self) -> StateSnapshots:
        assert self.cache.snapshots is not None
        return self.cache.snapshots

    @rule(user=USERS, ids=PROMPTS, private=st.booleans(), stays=st.sampled_from([False, False, True]))
    def serve(self, user: str, ids: list[int], private: bool, stays: bool) -> None:
        """Serve a prompt, and save at regular depths and at its last whole page."""
        before = len(self.rows)
        super().serve(user, ids, private, True)
        if len(self.rows) == before:
            return
        lock, _, _ = self.rows[-1]
        scope = self.cache.view_of(View(Subject("tenant", user)))
        owners: list[Scope] = []
        at = self.cache.locks.path_of(lock).node
        while at is not None and at.parent is not None:
            # Of a row that began before its nodes were shared, a private one.
            owners += [scope if private else at.owner_id] * at.size
            at = at.parent
        depths = [*range(INTERVAL, len(ids) // PAGE_SIZE + 1, INTERVAL), (len(ids) - 1) // PAGE_SIZE]
        for depth in sorted({depth for depth in depths if depth}):
            self.save(tuple(ids[: depth * PAGE_SIZE]), int(lock.pages[depth - 1]), owners[-depth])
        if not stays or len(self.rows) > 2:
            self.end()

    def save(self, tokens: Content, page: int, owner: Scope) -> None:
        slot = self.snapshots.try_allocate()
        if slot is not None:
            assert slot not in self.busy_slots(TransferDirection.DEVICE_TO_HOST), "it is being read"
            assert slot not in self.busy_slots(TransferDirection.HOST_TO_DEVICE), "it is being written"
            self.device_states[slot] = tokens
            self.snapshots.attach(page, owner, slot)

    def busy_slots(self, direction: TransferDirection) -> set[int]:
        return {
            slot
            for transfer in self.open.values()
            if transfer.direction is direction
            for slot in transfer.device_snapshots.tolist()
        }

    # --- the model ---

    def path(self, user: str, ids: list[int]) -> list[tuple[Node, int]]:
        """Return each page of a view's path, on any tier, by its node and index there."""
        view = self.cache.store.accounts.view(self.cache.view_of(View(Subject("tenant", user))))
        pages: list[tuple[Node, int]] = []
        at, size = self.cache.store.tree.root, PAGE_SIZE
        while True:
            tokens = ids[len(pages) * size :]
            nodes = [
                node
                for node in self.cache.store.tree.children(at)
                if node.owner in (view, view.tenant, self.cache.store.accounts.public)
                and list(memoryview(node.key[: 4 * size]).cast("i")) == tokens[:size]
                and not node.is_hidden_from(view)
            ]
            if not nodes or len(tokens) < size:
                return pages
            (node,) = nodes
            key = list(memoryview(node.key).cast("i"))
            common = 0
            while (common + 1) * size <= len(tokens) and tokens[: (common + 1) * size] == key[: (common + 1) * size]:
                common += 1
            pages += [(node, index) for index in range(common)]
            if common < node.size:
                return pages
            at = node

    def usable(self, user: str, ids: list[int], *, on_host: bool) -> int:
        """Return after how many pages a row can continue from a tier's snapshots, by what the slots hold."""
        scope = self.cache.view_of(View(Subject("tenant", user)))
        best = 0
        for depth, (node, index) in enumerate(self.path(user, ids)[: (len(ids) - 1) // PAGE_SIZE], start=1):
            pages = node.host_pages if on_host else node.pages if len(node.pages) else None
            if pages is None:
                break
            pool, held = (self.states.host, self.host_states) if on_host else (self.snapshots, self.device_states)
            for entry in pool.all():
                if entry.page == pages[index] and entry.owner.scope in (scope, scope[:1], PUBLIC_SCOPE):
                    assert held[entry.slot] == tuple(ids[: depth * PAGE_SIZE])
                    best = depth
        return best

    @rule(user=USERS, ids=PROMPTS, at_once=OFTEN)
    def load(self, user: str, ids: list[int], at_once: bool) -> None:
        view, array = View(Subject("tenant", user)), np.array([*ids, 99], np.int32)
        match, numbers = self.tier.find(view, array), array.tolist()
        on_device, on_host = (self.usable(user, numbers, on_host=each) for each in (False, True))
        assert match.device_tokens == self.cache.peek(view, array) == on_device * PAGE_SIZE
        assert match.host_tokens == max(on_host - on_device, 0) * PAGE_SIZE
        if not match.host_tokens or match.loading is not None:
            return
        path = self.path(user, numbers)[:on_host]
        missing = [
            node.host_pages[index] for node, index in path if not len(node.pages) and node.host_pages is not None
        ]
        transfer = self.tier.load(view, array, self.allocate)
        if transfer is not None:
            assert transfer.host_pages.tolist() == missing
            assert [self.host_states[slot] for slot in transfer.host_snapshots.tolist()] == [
                tuple(numbers[: on_host * PAGE_SIZE])
            ]
            assert match.copied_tokens == (len(missing) + INTERVAL) * PAGE_SIZE
            self.begin(transfer, at_once)

    def begin(self, transfer: Transfer, at_once: bool) -> None:
        is_load = transfer.direction is TransferDirection.HOST_TO_DEVICE
        sources = transfer.host_snapshots if is_load else transfer.device_snapshots
        held = self.host_states if is_load else self.device_states
        for other in self.open.values():
            assert not set(other.device_snapshots.tolist()) & set(transfer.device_snapshots.tolist()) or (
                not is_load and other.direction is transfer.direction
            )
        self.moving[transfer.transfer_id] = [held[slot] for slot in sources.tolist()]
        super().begin(transfer, at_once)

    def finish(self, transfer_id: int) -> None:
        transfer, moved = self.open[transfer_id], self.moving.pop(transfer_id)
        is_load = transfer.direction is TransferDirection.HOST_TO_DEVICE
        sources, targets = transfer.device_snapshots.tolist(), transfer.host_snapshots.tolist()
        held, into = self.device_states, self.host_states
        if is_load:
            sources, targets, held, into = targets, sources, into, held
        for source, target, state in zip(sources, targets, moved, strict=True):
            assert held[source] == state, "a slot was given to others while it was copied"
            into[target] = state
        super().finish(transfer_id)

    @rule(user=USERS, really=RARELY)
    def forget(self, user: str, really: bool) -> None:
        super().forget(user, really)
        if really:
            for pool in (self.snapshots, self.states.host):
                assert not any(entry.owner.scope[1:2] == (user,) for entry in pool.all())
            if not self.rows:
                # Nor does what was on its way arrive.
                for transfer_id in list(self.open):
                    self.finish(transfer_id)
                for pool in (self.snapshots, self.states.host):
                    assert not any(entry.owner.scope[1:2] == (user,) for entry in pool.all())

    @rule(count=st.integers(1, 6), on_host=st.booleans())
    def evict_snapshots(self, count: int, on_host: bool) -> None:
        pool = self.states.host if on_host else self.snapshots
        taken = [slot for _ in range(count) if (slot := pool.try_reserve()) is not None]
        for slot in taken:
            pool.cancel(slot)

    def end_all(self) -> None:
        super().end_all()
        self.moving.clear()
        for pool in (self.snapshots, self.states.host):
            assert pool.kept == pool.held == pool.moving == 0

    @invariant()
    def slots_are_accounted_for(self) -> None:
        if hasattr(self, "allocator"):
            assert self.snapshots.faults() == self.states.faults() == []
            accounts = self.tier.account_snapshots()
            assert accounts is not None
            assert accounts.is_exact
            assert accounts.free + accounts.evictable + accounts.protected == accounts.capacity
            open_copies = sum(len(transfer.device_snapshots) for transfer in self.open.values())
            assert self.states.host.moving + self.snapshots.moving >= open_copies

    @invariant()
    def every_snapshot_holds_the_tokens_before_its_page(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for node, _ in self.cache.store.tree.walk():
            tokens = tuple(memoryview(self.cache.store.tree.path_key(node)).cast("i"))
            above = len(tokens) - node.size * PAGE_SIZE
            for index, entry in self.snapshots.on(node.pages):
                assert self.device_states[entry.slot] == tokens[: above + (index + 1) * PAGE_SIZE]
            for index, entry in [] if node.host_pages is None else self.states.host.on(node.host_pages):
                assert self.host_states[entry.slot] == tokens[: above + (index + 1) * PAGE_SIZE]

    @invariant()
    def copies_belong_to_their_nodes(self) -> None:
        """Each snapshot of the host is of one page of one node, and of its owner, or of a view of a shared one.

        Only pages that a load still reads may have lost their node.
        """
        if not hasattr(self, "allocator"):
            return
        found: list[SnapshotEntry] = []
        for node, _ in self.cache.store.tree.walk():
            for _, entry in [] if node.host_pages is None else self.states.host.on(node.host_pages):
                assert node.is_shared or entry.owner is node.owner
                found.append(entry)
        read = pages_being_read(self.tier)
        assert all(entry in found or entry.page in read for entry in self.states.host.all())


TestStateCopies = StateCopiesMachine.TestCase
TestStateCopies.settings = examples(25, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps() -> None:
    run_state_machine_as_test(
        StateCopiesMachine, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None)
    )
