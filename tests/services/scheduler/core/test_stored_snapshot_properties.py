"""The random lives of recurrent models over two tiers above a storage where pages and snapshots come and go.

Each row continues from a state of its own tokens, and no slot is read or written by two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig
from tests.examples import examples
from tests.fakes.storing_worker import Objects, StoringWorker, storing
from tests.services.scheduler.core.test_host_snapshot_properties import HostSnapshotMachine
from tests.services.scheduler.core.test_storage_properties import Names

if TYPE_CHECKING:
    from services.scheduler.cache.tiers.host_tier import HostTier


class StoredSnapshotMachine(HostSnapshotMachine):
    """Storage that outlives its workers: an object stays there until it is removed or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: Objects = {}

    @initialize(
        policy=st.sampled_from(PrefetchPolicy),
        min_pages=st.integers(1, 3),
        window=st.integers(1, 16),
        writes=st.sampled_from([True, True, True, False]),
    )
    def add_storage(self, policy: PrefetchPolicy, min_pages: int, window: int, writes: bool) -> None:
        self.storage_config = StorageConfig(policy, wait_s=1.0, min_pages=min_pages, window_pages=window, writes=writes)

    @property
    def host(self) -> HostTier:
        host = self.harness.cache.host
        assert host is not None
        return host

    def attach(self) -> None:
        """Add storage, once both initial rules have run."""
        if self.host.storage is None:
            self.host.add_storage(self.storage_config, Names())
        if not isinstance(self.harness.worker, StoringWorker):
            self.harness.worker = storing(self.harness.worker, self.objects)

    @invariant()
    def both_tiers_are_sound(self) -> None:
        if hasattr(self, "harness") and hasattr(self, "storage_config"):
            self.attach()
        super().both_tiers_are_sound()

    @invariant()
    def each_stored_snapshot_has_tokens_that_its_name_is_of(self) -> None:
        assert all(content for _, content in self.objects.values())

    @rule()
    def storage_fails_or_comes_back(self) -> None:
        assert isinstance(self.harness.worker, StoringWorker)
        self.harness.worker.is_down = not self.harness.worker.is_down

    @precondition(lambda self: bool(self.objects))
    @rule(data=st.data(), is_damaged=st.booleans())
    def an_object_is_lost_or_damaged(self, data: st.DataObject, is_damaged: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.objects)))
        if is_damaged:
            self.objects[name] = b"forged", self.objects[name][1]
        else:
            del self.objects[name]

    @precondition(lambda self: bool(self.objects))
    @rule(data=st.data())
    def a_rank_loses_everything(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted({rank for rank, _ in self.objects})))
        for name in [name for name in self.objects if name[0] == rank]:
            del self.objects[name]

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.harness.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "harness") and hasattr(self, "storage_config"):
            self.attach()
        super().teardown()
        if hasattr(self, "harness") and self.host.storage is not None:
            assert not self.host.storage._reads._fetches
            assert self.host.storage.reading_pages == self.host.storage.writing_pages == 0


TestStoredSnapshots = StoredSnapshotMachine.TestCase
TestStoredSnapshots.settings = examples(20, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ninety_thousand_steps() -> None:
    run_state_machine_as_test(
        StoredSnapshotMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )
