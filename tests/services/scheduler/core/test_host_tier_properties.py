"""Random lives of many requests over two tiers: transfers end when they like, rank by rank, and every KV read is right.

The simulated worker finds out whoever touches a page while it is being copied, and every row that reads a slot which
does not hold its token at its position.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.types import CacheMode, FinishReason, RequestId, Subject
from services.scheduler.cache.config import CacheConfig, PrivacyProfile
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from tests.examples import examples
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_core_properties import PROMPTS

USERS = ("ann", "bob", "cid")
RULES = CacheConfig(
    promotion_subjects=2,
    headroom_share=0.0,
    profile=PrivacyProfile(hit_min=2, diversity_min=1.0, demotion_quarantines=1),
)


class HostTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, tuple[list[int], int, int]] = {}
        self.aborted: set[str] = set()

    @initialize(
        pages=st.integers(14, 30),
        host_pages=st.integers(1, 40),
        policy=st.sampled_from(WritePolicy),
        ranks=st.integers(1, 3),
        depth=st.integers(1, 3),
        lock=st.sampled_from([0.0, 0.004]),
        cache=st.sampled_from(["user_aware", "user_aware", "isolated", "shared"]),
        quota=st.sampled_from([0.25, 1.0]),
        merges=st.booleans(),
    )
    def start(
        self,
        pages: int,
        host_pages: int,
        policy: WritePolicy,
        ranks: int,
        depth: int,
        lock: float,
        cache: str,
        quota: float,
        merges: bool,
    ) -> None:
        self.harness = Harness(
            pages=pages,
            host=HostConfig(pages=host_pages, policy=policy, window_pages=8),
            ranks=ranks,
            depth=depth,
            target_plan_s=lock,
            max_step_tokens=12,
            max_context=56,
            max_waiting=2000,
            cache=cache,  # type: ignore[arg-type]  # drawn from its names
            rules=replace(RULES, quota_share=quota, strict_numerics=not merges),
        )

    @rule(
        prompt=PROMPTS,
        user=st.sampled_from(USERS),
        max_tokens=st.integers(1, 22),
        n=st.sampled_from([1, 1, 1, 2]),
        mode=st.sampled_from([CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.PRIVATE, CacheMode.NONE]),
    )
    def submit(self, prompt: list[int], user: str, max_tokens: int, n: int, mode: CacheMode) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt, user=user, max_tokens=max_tokens, n=n, cache_mode=mode)
        assert self.harness.core.submit(request, 0.0).rejected is None
        self.requests[name] = (prompt, max_tokens, n)

    @rule(data=st.data(), count=st.integers(1, 20), then=st.integers(0, 6))
    def come_back(self, data: st.DataObject, count: int, then: int) -> None:
        """Ask once more for what has been copied to the host and evicted from the device."""
        if not self.requests:
            return
        prompt, max_tokens, _ = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.work_with_fast_transfers(count)
        self.harness.cache.evict(20)
        for user in USERS:
            self.submit(prompt, user, max_tokens, 1, CacheMode.DEFAULT)
        self.work(then)

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.harness.plan()
            self.harness.result()

    @rule(count=st.integers(1, 12))
    def work_with_fast_transfers(self, count: int) -> None:
        for _ in range(count):
            self.harness.plan()
            self.harness.result()
            self.harness.complete_all()

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        waiting = [(key, rank) for key, opened in self.harness.worker.open.items() for rank in sorted(opened.ranks)]
        if waiting:
            self.harness.complete(*data.draw(st.sampled_from(waiting)))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            if self.harness.core.abort(RequestId(name)):
                self.aborted.add(name)
            self.harness.collect()

    @rule()
    def lose_workers(self) -> None:
        self.harness.lose_workers()

    @rule()
    def flush(self) -> None:
        self.harness.cache.flush()

    @rule(user=st.sampled_from(USERS))
    def forget(self, user: str) -> None:
        self.harness.cache.forget(Subject("tenant", user))

    @rule(epochs=st.integers(1, 2))
    def next_epoch(self, epochs: int) -> None:
        self.harness.cache.advance(self.harness.cache.epoch + epochs)

    @rule(pages=st.integers(1, 20))
    def evict(self, pages: int) -> None:
        self.harness.cache.evict(pages)

    @invariant()
    def both_tiers_are_sound(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_accounts()
            self.harness.audit()
            assert isinstance(self.harness.cache, RadixCache)
            assert violations(self.harness.cache) == []

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for name, (prompt, max_tokens, n) in self.requests.items():
            limit = min(len(prompt) + max_tokens, 56, self.harness.config.capacity_tokens)
            for index in range(n):
                finish = self.harness.finishes[name, index]
                if name in self.aborted:
                    continue
                assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert self.harness.outputs[name, index] == expected_output(prompt, limit, (STOP_ID,))
        assert not self.harness.worker.open
        self.harness.cache.flush()
        host = self.harness.cache.host
        assert host is not None
        assert self.harness.core.memory.allocator.free_pages == self.harness.config.device_pages
        assert host.pages.allocator.free_pages == host.config.pages


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = examples(20, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ninety_thousand_steps() -> None:
    run_state_machine_as_test(
        HostTierMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )
