"""Device pages for prompts of other groups are granted, charged and taken back in the order of admission."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import RequestId
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.core.costs import LoadCosts
from services.scheduler.core.fair_rows import PLANS_BETWEEN_LOOKS
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_device_place import PAGE, lend, prefilled

if TYPE_CHECKING:
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from services.scheduler.core.sequence import Sequence

# Twelve pages, of which eleven may come from another group.
LENGTH, WHOLE_PAGES = 48, 11


class Arriving:
    """Requests of several tenants, of which some wait for pages of another group."""

    def __init__(self, policy: Any = "fair", pages: int = 40, max_rows: int = 8, **options: Any) -> None:
        host = HostConfig(pages=400, policy=WritePolicy.WRITE_THROUGH)
        self.harness = Harness(policy=policy, pages=pages, host=host, max_rows=max_rows, max_step_tokens=64, **options)
        self.harness.worker.read_peer = lambda peer: lend(self.prompts, peer)
        self.prompts: dict[int, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        # The number of the prompt of each request that waits for pages, or did.
        self.fetches: dict[PeerFetch, int] = {}

    def local(self, name: str, tenant: str, length: int, max_tokens: int = 2, **options: Any) -> Sequence:
        """Submit a request that is computed here."""
        number = len(self.prompts)
        self.prompts[number] = [(37 * number + 11 * at) % 880 + 10 for at in range(length)]
        self.max_tokens[name] = max_tokens
        request = make_request(name, self.prompts[number], tenant=tenant, max_tokens=max_tokens, **options)
        assert self.harness.core.submit(request, self.harness.now).rejected is None
        sequence = self.harness.core.leader_of(RequestId(name))
        assert sequence is not None
        return sequence

    def remote(self, name: str, tenant: str, offered: int = 1, **options: Any) -> PeerFetch:
        """Submit a request whose prompt another group computes, which has computed `offered` pages of it so far."""
        number, sequence = len(self.prompts), self.local(name, tenant, LENGTH, **options)
        loads = self.harness.core.memory.loads
        assert loads is not None
        # Whatever has been measured.
        loads.costs = LoadCosts(1)
        fetch = loads.await_peer(sequence, PAGE)
        assert fetch is not None
        self.fetches[fetch] = number
        if offered:
            self.offer(fetch, offered)
        return fetch

    def offer(self, fetch: PeerFetch, end: int = WHOLE_PAGES) -> None:
        """Offer the pages of a prompt up to `end`."""
        number = self.fetches[fetch]
        fetch.offer(("worker",), b"lease", range(1000 * number + len(fetch.offered), 1000 * number + end))
        if end == WHOLE_PAGES:
            fetch.complete(0.0)

    def step(self) -> None:
        self.harness.plan()
        self.harness.check_accounts()
        self.harness.result()
        self.harness.complete_all()

    def running(self) -> set[str]:
        return {sequence.request.request_id for sequence in self.harness.core.rows.occupants()}

    def finish(self) -> None:
        """Let the other group and then all requests end, and compare their tokens with those of a single group."""
        for fetch in self.fetches:
            if not fetch.is_complete:
                self.offer(fetch)
        self.harness.run()
        self.harness.audit()
        assert self.harness.cache.protected_pages == 0
        for number, (name, most) in enumerate(self.max_tokens.items()):
            prompt = self.prompts[number]
            assert self.harness.outputs[name, 0] == expected_output(prompt, len(prompt) + most, (STOP_ID,)), name


def test_a_tenant_with_many_prompts_in_flight_gives_way_to_another_one() -> None:
    arriving = Arriving()
    arriving.local("running", "carol", 8, max_tokens=60)
    arriving.step()
    fetches = [arriving.remote(f"long {number}", "alice") for number in range(3)]
    arriving.step()
    assert [fetch.holds_place for fetch in fetches] == [True, True, True]
    arriving.local("short", "bob", 30, max_tokens=40)
    for _ in range(PLANS_BETWEEN_LOOKS + 2):
        arriving.step()
    assert "short" in arriving.running()
    assert [fetch.holds_place for fetch in fetches] == [True, True, False], "the youngest"
    arriving.finish()
    assert arriving.harness.core.memory.retractions == 0
    assert prefilled(arriving.harness) < 8 + 30 + 3 * 2 * PAGE, "what was taken back arrived on the host"


def test_prompts_that_another_group_has_yet_to_compute_keep_no_rows_from_others() -> None:
    arriving = Arriving(max_rows=4)
    for number in range(4):
        arriving.remote(f"long {number}", "alice", offered=0)
    arriving.step()
    arriving.local("short", "bob", 8)
    arriving.step()
    assert arriving.running() == {"short"}
    arriving.finish()


def test_reserved_pages_count_when_rows_are_preempted_for_a_share_of_the_memory() -> None:
    arriving = Arriving()
    arriving.local("running", "bob", 8, max_tokens=100)
    arriving.step()
    for number in range(2):
        arriving.remote(f"long {number}", "alice")
    arriving.step()
    # Alice has 22 of 40 pages, bob soon more than the rest: nothing more is due to her.
    arriving.local("more", "alice", 46)
    for _ in range(60):
        arriving.step()
    assert "running" in arriving.running()
    assert arriving.harness.core.preemptions == 0
    arriving.finish()


def test_a_higher_priority_takes_reserved_pages_before_rows() -> None:
    arriving = Arriving("priority", max_preemptions=2)
    # Its pages would suffice, too.
    arriving.local("running", "bob", 40, max_tokens=60, priority=0)
    arriving.step()
    fetches = [arriving.remote(f"long {number}", "alice", priority=number) for number in (1, 0)]
    arriving.step()
    assert [fetch.holds_place for fetch in fetches] == [True, True]
    arriving.local("urgent", "carol", 60, priority=5)
    arriving.step()
    assert arriving.running() == {"running", "urgent"}
    assert arriving.harness.core.preemptions == 0
    assert [fetch.holds_place for fetch in fetches] == [True, False], "of the lowest priority"
    arriving.finish()


def test_a_lower_priority_takes_nothing_from_prompts_of_a_higher_one() -> None:
    arriving = Arriving("priority")
    arriving.local("running", "bob", 8, max_tokens=60)
    arriving.step()
    fetches = [arriving.remote(f"long {number}", "alice", priority=5) for number in range(3)]
    arriving.step()
    arriving.local("modest", "carol", 40)
    for _ in range(5):
        arriving.step()
    assert arriving.running() == {"running"}
    assert all(fetch.holds_place for fetch in fetches)
    arriving.finish()


def test_pages_are_granted_by_priority_and_not_by_the_order_of_requests() -> None:
    arriving = Arriving("priority", pages=16)
    low = arriving.remote("low", "alice")
    high = arriving.remote("high", "bob", priority=5)
    arriving.step()
    assert (low.holds_place, high.holds_place) == (False, True)
    arriving.finish()


def test_a_sequence_that_lacks_memory_keeps_it_from_prompts_that_come_after_it() -> None:
    arriving = Arriving(None, pages=24)
    arriving.local("running", "bob", 40, max_tokens=24)
    arriving.step()
    arriving.local("first", "carol", 80)
    fetch = arriving.remote("second", "alice")
    arriving.step()
    assert not fetch.holds_place
    arriving.finish()


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_prompt_is_charged_as_if_it_had_been_computed_here(*, is_remote: bool, is_on_device: bool) -> None:
    arriving = Arriving()
    counters = arriving.harness.counters
    assert counters is not None
    before = counters.of_tenant("alice")
    if is_remote:
        fetch = arriving.remote("one", "alice", offered=0)
        if not is_on_device:
            fetch.place = None
        arriving.offer(fetch)
    else:
        arriving.local("one", "alice", LENGTH)
    arriving.remote("other", "carol", offered=0)
    arriving.harness.run()
    after = counters.of_tenant("alice")
    assert after - before == LENGTH + 2 * len(arriving.harness.outputs["one", 0])


def test_tokens_that_the_other_group_had_cached_are_not_charged() -> None:
    arriving = Arriving()
    counters = arriving.harness.counters
    assert counters is not None
    # As long as another tenant waits that has received less, a counter is exact.
    arriving.remote("other", "carol", offered=0)
    before = counters.of_tenant("alice")
    fetch = arriving.remote("one", "alice", offered=0)
    fetch.found_tokens = 5 * PAGE
    arriving.offer(fetch)
    arriving.harness.run()
    assert arriving.harness.cached["one", 0] == 5 * PAGE
    assert counters.of_tenant("alice") - before == LENGTH - 5 * PAGE + 2 * len(arriving.harness.outputs["one", 0])


def test_a_request_that_ends_while_its_prompt_arrives_is_charged_for_what_has_arrived() -> None:
    arriving = Arriving()
    counters = arriving.harness.counters
    assert counters is not None
    arriving.remote("other", "carol", offered=0)
    before = counters.of_tenant("alice")
    arriving.remote("one", "alice", offered=3)
    arriving.step()
    assert counters.of_tenant("alice") - before == WHOLE_PAGES * PAGE
    # With other weights, the refund has those of the charge.
    counters.adopt(Limits(default=TenantLimits(weight=0.25, each_subject=SubjectLimits(weight=0.5))))
    arriving.harness.core.abort(RequestId("one"))
    assert counters.of_tenant("alice") - before == 3 * PAGE


def test_what_is_cached_when_a_prompt_starts_is_refunded_with_the_weights_of_its_reservation() -> None:
    arriving = Arriving()
    counters = arriving.harness.counters
    assert counters is not None
    arriving.remote("other", "carol", offered=0)
    before = counters.of_tenant("alice")
    fetch = arriving.remote("one", "alice", offered=3)
    arriving.step()
    assert counters.of_tenant("alice") - before == WHOLE_PAGES * PAGE
    counters.adopt(Limits(default=TenantLimits(weight=0.25)))
    fetch.found_tokens = 5 * PAGE
    arriving.offer(fetch)
    arriving.harness.run()
    output = len(arriving.harness.outputs["one", 0])
    assert counters.of_tenant("alice") - before == LENGTH - 5 * PAGE + 2 * output / 0.25


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs", "lpm"])
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_all_requests_end_with_their_tokens_whatever_is_reserved_and_taken_back(policy: str, seed: int) -> None:
    random = Random(seed)
    arriving = Arriving(policy, pages=random.choice([26, 34, 60]), max_rows=8, max_preemptions=2)
    taken = 0
    for step in range(200):
        tenant, priority = random.choice("abc"), random.randrange(3)
        if random.random() < 0.12:
            arriving.remote(f"{step}", tenant, offered=0, priority=priority)
        elif random.random() < 0.15:
            length, most = random.randint(2, 40), random.randint(1, 24)
            arriving.local(f"{step}", tenant, length, max_tokens=most, priority=priority)
        for fetch in arriving.fetches:
            if not fetch.is_complete and random.random() < 0.1:
                arriving.offer(fetch, min(WHOLE_PAGES, len(fetch.offered) + random.randint(1, 4)))
        held = [fetch for fetch in arriving.fetches if fetch.holds_place]
        arriving.step()
        taken += sum(fetch.place is None and not fetch.is_done for fetch in held)
    arriving.finish()
    assert taken
