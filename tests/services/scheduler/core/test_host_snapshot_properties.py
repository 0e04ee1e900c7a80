"""Random lives of many requests of a recurrent model over two tiers: each row continues from a state of its own tokens.

The simulated worker knows the tokens that each slot has taken in, and finds accesses to one that is being copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from tests.examples import examples
from tests.services.scheduler.cache.tiers.test_state_copies_model import pages_being_read
from tests.services.scheduler.core.harness import Harness
from tests.services.scheduler.core.test_host_tier_properties import RULES, HostTierMachine

if TYPE_CHECKING:
    from services.scheduler.cache.state_snapshots import SnapshotEntry


class HostSnapshotMachine(HostTierMachine):
    @initialize(
        sizes=st.tuples(st.integers(14, 30), st.integers(1, 40), st.integers(2, 12), st.integers(0, 16)),
        interval=st.integers(1, 4),
        policy=st.sampled_from(WritePolicy),
        ranks=st.integers(1, 2),
        depth=st.integers(1, 3),
        lock=st.sampled_from([0.0, 0.004]),
        cache=st.sampled_from(["user_aware", "user_aware", "isolated", "shared"]),
        quota=st.sampled_from([0.25, 1.0]),
        merges=st.booleans(),
    )
    def start(
        self,
        sizes: tuple[int, int, int, int],
        interval: int,
        policy: WritePolicy,
        ranks: int,
        depth: int,
        lock: float,
        cache: str,
        quota: float,
        merges: bool,
    ) -> None:
        pages, host_pages, snapshots, host_snapshots = sizes
        self.harness = Harness(
            pages=pages,
            snapshots=snapshots,
            interval=interval,
            host=HostConfig(pages=host_pages, snapshots=host_snapshots, policy=policy, window_pages=8),
            ranks=ranks,
            depth=depth,
            target_plan_s=lock,
            max_step_tokens=12,
            max_context=56,
            max_waiting=2000,
            cache=cache,  # type: ignore[arg-type]  # drawn from its names
            rules=replace(RULES, quota_share=quota, strict_numerics=not merges),
        )

    @rule(count=st.integers(1, 6), on_host=st.booleans())
    def evict_snapshots(self, count: int, on_host: bool) -> None:
        """Let copies take slots, for which the coldest snapshots go, and give them back."""
        assert self.harness.cache.host is not None
        states = self.harness.cache.host.states
        assert states is not None
        pool = states.host if on_host else states.device
        taken = [slot for _ in range(count) if (slot := pool.try_reserve()) is not None]
        for slot in taken:
            pool.cancel(slot)

    @invariant()
    def the_slots_of_open_copies_are_those_of_the_worker(self) -> None:
        if not hasattr(self, "harness"):
            return
        assert self.harness.cache.host is not None
        states = self.harness.cache.host.states
        assert states is not None
        open_slots = sum(len(opened.transfer.device_snapshots) for opened in self.harness.worker.open.values())
        assert states.device.moving + states.host.moving >= open_slots
        if not len(self.harness.cache.host.ledger):
            assert states.device.moving == states.host.moving == 0

    @invariant()
    def each_kept_snapshot_has_the_tokens_of_its_page(self) -> None:
        if not hasattr(self, "harness"):
            return
        cache, worker = self.harness.cache, self.harness.worker
        assert isinstance(cache, RadixCache)
        assert cache.host is not None
        assert cache.host.states is not None
        assert worker.snapshots is not None
        seen: set[SnapshotEntry] = set()
        for node, _ in cache.store.tree.walk():
            tokens = list(memoryview(cache.store.tree.path_key(node)).cast("i"))
            above = len(tokens) - node.size * cache.page_size
            for index, entry in cache.snapshots.on(node.pages) if cache.snapshots is not None else ():
                # What a plan in flight saves is there when its pass is over, which is known later.
                assert worker.snapshots[entry.slot] == tokens[: above + (index + 1) * cache.page_size]
            if node.host_pages is not None:
                for index, entry in cache.host.states.host.on(node.host_pages):
                    seen.add(entry)
                    assert worker.host_snapshots[entry.slot] == tokens[: above + (index + 1) * cache.page_size]
                    assert node.is_shared or entry.owner is node.owner
        read = pages_being_read(cache.host)
        assert all(entry in seen or entry.page in read for entry in cache.host.states.host.all())


TestHostSnapshots = HostSnapshotMachine.TestCase
TestHostSnapshots.settings = examples(20, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ninety_thousand_steps() -> None:
    run_state_machine_as_test(
        HostSnapshotMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )
