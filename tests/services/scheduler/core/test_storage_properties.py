"""The random lives of the host tier's test above a storage where pages come and go; every KV that is read is right."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from services.scheduler.cache.object_keys import scope_keys
from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig
from tests.examples import examples
from tests.fakes.storing_worker import Objects, StoringWorker, storing
from tests.services.scheduler.core.test_host_tier_properties import HostTierMachine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from services.scheduler.cache.object_keys import ObjectKeys
    from services.scheduler.cache.types import Scope


class Names:
    """A keyring in memory."""

    def __init__(self) -> None:
        self._generations: Counter[Scope] = Counter()

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        return scope_keys(b"secret", bytes([self._generations[scope]]), scope).of_pages(hashes)

    def revoke(self, scope: Scope) -> None:
        self._generations[scope] += 1

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class StorageMachine(HostTierMachine):
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

    def attach(self) -> None:
        """Add storage, once both initial rules have run."""
        host = self.harness.cache.host
        assert host is not None
        if host.storage is None:
            host.add_storage(self.storage_config, Names())
        if not isinstance(self.harness.worker, StoringWorker):
            self.harness.worker = storing(self.harness.worker, self.objects)

    @invariant()
    def both_tiers_are_sound(self) -> None:
        if hasattr(self, "harness") and hasattr(self, "storage_config"):
            self.attach()
        super().both_tiers_are_sound()

    @rule()
    def storage_fails_or_comes_back(self) -> None:
        assert isinstance(self.harness.worker, StoringWorker)
        self.harness.worker.is_down = not self.harness.worker.is_down

    @precondition(lambda self: bool(self.objects))
    @rule(data=st.data())
    def an_object_gets_lost(self, data: st.DataObject) -> None:
        del self.objects[data.draw(st.sampled_from(sorted(self.objects)))]

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.harness.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "harness") and hasattr(self, "storage_config"):
            self.attach()
        super().teardown()


TestStorage = StorageMachine.TestCase
TestStorage.settings = examples(15, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ninety_thousand_steps() -> None:
    run_state_machine_as_test(
        StorageMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )
