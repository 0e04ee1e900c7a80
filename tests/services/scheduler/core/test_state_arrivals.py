"""Prompts of recurrent models that another group computes: states arrive with the pages, or the prompt is computed.

Slots for states, of which there are few, are given to no other before their transfer has been acknowledged.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from common.types import RequestId
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.core.costs import LoadCosts
from services.scheduler.memory_checks import MemoryChecks
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.scheduler.core.test_device_place import (
    PAGE,
    PROMPT,
    TO_DEVICE,
    TO_HOST,
    WHOLE_PAGES,
    directions,
    finish,
    lend,
    prefilled,
)
from tests.services.scheduler.core.test_host_snapshots import lose_snapshots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.transfers import PeerPages, Transfer
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.tiers.peer_reads import PeerFetch

LEFT = len(PROMPT) - WHOLE_PAGES * PAGE


def make_harness(snapshots: int = 12, pages: int = 40, host_pages: int = 40, **options: object) -> Harness:
    host = HostConfig(pages=host_pages, policy=WritePolicy.WRITE_THROUGH, snapshots=20)
    options = {"snapshots": snapshots, "interval": 4, "max_context": 120, **options}
    return Harness(pages=pages, host=host, **options)  # type: ignore[arg-type]


def lend_states(prompts: Mapping[int, Sequence[int]], peer: PeerPages) -> list[list[int]]:
    """Return the states of the other group: slot 1,000 * i + n has them after n pages of prompt i."""
    return [list(prompts[slot // 1000][: slot % 1000 * PAGE]) for slot in peer.device_snapshots.tolist()]


def submit(harness: Harness, name: str, prompt: Sequence[int] = PROMPT, user: str = "alice") -> PeerFetch:
    harness.worker.read_peer = lambda peer: lend({0: prompt}, peer)
    harness.worker.read_peer_states = lambda peer: lend_states({0: prompt}, peer)
    assert harness.core.submit(make_request(name, list(prompt), user=user, max_tokens=2), harness.now).rejected is None
    fetch = await_peer(harness, name)
    assert fetch is not None
    return fetch


def await_peer(harness: Harness, name: str) -> PeerFetch | None:
    sequence, loads = harness.core.leader_of(RequestId(name)), harness.core.memory.loads
    assert sequence is not None
    assert loads is not None
    return loads.await_peer(sequence, PAGE)


def offer(fetch: PeerFetch, end: int = WHOLE_PAGES, *, is_last: bool = True, prompt: int = 0) -> None:
    """Offer pages up to `end`, and with the last ones the states after them."""
    first = 1000 * prompt
    fetch.offer(("worker",), b"lease", range(first + len(fetch.offered), first + end))
    if is_last:
        fetch.offer_snapshot(first + end)
        fetch.complete(0.0)


def pool_of(harness: Harness) -> StateSnapshots:
    assert harness.cache.snapshots is not None
    return harness.cache.snapshots


def arrivals(harness: Harness) -> list[Transfer]:
    return [transfer for plan in harness.plans for transfer in plan.transfers if transfer.direction is TO_DEVICE]


def test_states_arrive_with_the_last_pages_and_rows_continue_from_them() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5, is_last=False)
    harness.run()
    offer(fetch)
    assert finish(harness, "one") == 0, "another group's work is no hit"
    assert [(one.pages, len(one.device_snapshots)) for one in arrivals(harness)] == [(5, 0), (WHOLE_PAGES - 5, 1)]
    assert prefilled(harness) == LEFT
    assert fetch.has_arrived
    assert pool_of(harness).moving == 0


def test_states_arrive_alone_after_all_pages() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, is_last=False)
    harness.run()
    assert not fetch.is_done
    offer(fetch)
    finish(harness, "one")
    assert [(one.pages, len(one.device_snapshots)) for one in arrivals(harness)] == [(WHOLE_PAGES, 0), (0, 1)]
    assert prefilled(harness) == LEFT


def test_pages_up_to_the_last_states_are_used_and_the_rest_is_computed() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 8)
    finish(harness, "one")
    assert prefilled(harness) == len(PROMPT) - 8 * PAGE
    assert fetch.has_arrived


def test_without_states_the_whole_prompt_is_computed() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    fetch.offer(("worker",), b"lease", range(WHOLE_PAGES))
    fetch.complete(0.0)
    finish(harness, "one")
    assert prefilled(harness) == len(PROMPT)
    assert not fetch.has_arrived
    assert not arrivals(harness), "pages alone are not worth a transfer"


def test_states_that_cannot_be_read_leave_nothing_behind() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    harness.worker.read_peer_states = lambda _peer: []
    offer(fetch)
    finish(harness, "one")
    assert prefilled(harness) == len(PROMPT)
    assert not fetch.has_arrived
    assert pool_of(harness).moving == 0


def test_what_has_arrived_belongs_to_the_view_that_asked_for_it() -> None:
    harness = make_harness(cache="user_aware")
    offer(submit(harness, "one"))
    finish(harness, "one")
    ids = make_request("x", PROMPT).token_ids
    assert harness.cache.peek(make_request("x", PROMPT, user="bob").view, ids) == 0
    assert harness.cache.peek(make_request("x", PROMPT).view, ids) == WHOLE_PAGES * PAGE
    owners = {entry.owner.scope for entry in pool_of(harness).all()}
    assert owners == {harness.cache.view_of(make_request("x", PROMPT).view)}


def test_only_what_the_view_lacks_is_read() -> None:
    harness = make_harness()
    harness.core.submit(make_request("before", PROMPT[:24], max_tokens=2), 0.0)
    harness.run()
    fetch = submit(harness, "one")
    assert (fetch.first, fetch.resumable) == (6, 6)
    offer(fetch)
    assert finish(harness, "one") == 6 * PAGE
    (arrival,) = arrivals(harness)
    assert (arrival.pages, len(arrival.device_snapshots)) == (WHOLE_PAGES - 6, 1)
    assert prefilled(harness) == 24 + LEFT


def test_a_prompt_that_has_come_from_elsewhere_meanwhile_is_not_read() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    harness.core.submit(make_request("two", PROMPT[:-8], max_tokens=2), harness.now)
    harness.run()
    assert harness.core.memory.loads is not None
    peers = harness.core.memory.loads.host.peers
    peers.skip_present()
    assert fetch.resumable == (len(PROMPT) - 8) // PAGE
    harness.core.submit(make_request("three", PROMPT, max_tokens=2), harness.now)
    harness.run()
    peers.skip_present()
    assert fetch.is_done
    assert finish(harness, "one") == WHOLE_PAGES * PAGE
    assert not arrivals(harness)


def test_less_may_be_offered_than_the_view_has_by_then() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    harness.core.submit(make_request("two", PROMPT[:-8], max_tokens=2), harness.now)
    harness.run()
    computed = prefilled(harness)
    offer(fetch, 5)
    finish(harness, "one")
    assert prefilled(harness) - computed == len(PROMPT) - 10 * PAGE
    assert [(one.pages, len(one.device_snapshots)) for one in arrivals(harness)] == [(0, 1)]


def test_pages_that_lack_states_are_not_read_again() -> None:
    harness = make_harness()
    harness.core.submit(make_request("before", PROMPT[:24], max_tokens=2), 0.0)
    harness.run()
    view, ids = make_request("x", PROMPT).view, make_request("x", PROMPT).token_ids
    whole = harness.cache.commit_pages(view, ids)
    harness.cache.release(whole)
    harness.core.memory.allocator.release(whole.pages)
    assert len(whole.pages) == 6
    for on_host in (False, True):
        lose_snapshots(harness, on_host=on_host)
    fetch = submit(harness, "one")
    offer(fetch)
    assert finish(harness, "one") == 0
    (arrival,) = arrivals(harness)
    assert (arrival.pages, fetch.first) == (WHOLE_PAGES - 6, 6)
    assert prefilled(harness) == 24 + LEFT


def test_a_beginning_that_only_the_host_has_is_read_as_well() -> None:
    harness = make_harness(pages=20, max_context=70, host_pages=200)
    harness.core.submit(make_request("before", PROMPT[:24], max_tokens=2), 0.0)
    harness.run()
    for other in range(4):
        prompt = list(range(500 + 100 * other, 564 + 100 * other))
        harness.core.submit(make_request(f"other {other}", prompt, user="bob", max_tokens=2), harness.now)
        harness.run()
    computed = prefilled(harness)
    assert harness.core.memory.loads is not None
    match = harness.core.memory.loads.host.find(make_request("x", PROMPT).view, make_request("x", PROMPT).token_ids)
    assert (match.device_tokens, match.host_tokens) == (0, 24)
    fetch = submit(harness, "one")
    offer(fetch)
    finish(harness, "one")
    assert fetch.has_arrived
    # The device still had some pages of it, but no states.
    assert [transfer.pages for transfer in arrivals(harness)] == [WHOLE_PAGES - 3]
    assert prefilled(harness) - computed == LEFT


@pytest.mark.parametrize("snapshots", [1, 2])
def test_the_slot_for_states_that_are_on_their_way_is_given_to_no_row(snapshots: int) -> None:
    harness = make_harness(snapshots=snapshots)
    fetch = submit(harness, "one")
    offer(fetch, 5, is_last=False)
    harness.plan()
    pool = pool_of(harness)
    assert pool.moving == 1
    assert pool.try_reserve() is None
    # The rest is for rows.
    taken = [slot for _ in range(snapshots) if (slot := pool.try_allocate()) is not None]
    assert len(taken) == snapshots - 1
    for slot in taken:
        pool.release(slot)
    offer(fetch)
    finish(harness, "one")
    assert prefilled(harness) == LEFT


def test_without_a_slot_for_states_the_prompt_is_computed() -> None:
    harness = make_harness(snapshots=2)
    fetches = [submit(harness, name, PROMPT) for name in ("one", "two")]
    for fetch in fetches:
        offer(fetch)
    harness.run()
    harness.audit()
    assert sorted(fetch.has_arrived for fetch in fetches) == [False, True]
    assert TO_HOST not in directions(harness)


def test_without_room_on_the_device_the_prompt_is_computed() -> None:
    harness = make_harness(pages=16)
    harness.core.submit(make_request("long", list(range(300, 330)), user="bob", max_tokens=30), 0.0)
    harness.plan()
    fetch = submit(harness, "one")
    offer(fetch)
    assert finish(harness, "one") == 0
    assert not arrivals(harness)
    assert TO_HOST not in directions(harness), "states arrive on the device only"
    assert fetch.is_done


def test_running_rows_take_pages_that_wait_for_the_rest_of_a_prompt() -> None:
    harness = make_harness(pages=16)
    harness.core.submit(make_request("long", list(range(300, 310)), user="bob", max_tokens=40), 0.0)
    harness.plan()
    fetch = submit(harness, "one")
    offer(fetch, 3, is_last=False)
    harness.run()
    assert ("long", 0) in harness.finishes
    assert fetch.is_done, "what is missing could not come"
    assert pool_of(harness).moving == 0
    offer(fetch)
    finish(harness, "one")


def test_the_memory_of_states_counts_for_whether_it_pays_to_read_a_prompt() -> None:
    harness = make_harness()
    loads = harness.core.memory.loads
    assert loads is not None
    # Reading a token takes half as long as computing it, and states take as long as 16 tokens.
    loads.costs = LoadCosts(1)
    loads.costs.saw_prefill(1000, 1.0)
    loads.costs.saw_peer_read(1000, 0.5)
    for name, length, is_left in (("short", 14, False), ("long", 24, True)):
        harness.core.submit(make_request(name, PROMPT[:length], max_tokens=2), harness.now)
        fetch = await_peer(harness, name)
        assert (fetch is not None) == is_left, name
        if fetch is not None:
            fetch.stop()
    harness.run()


def test_the_link_is_measured_by_pages_and_states() -> None:
    harness = make_harness()
    loads = harness.core.memory.loads
    assert loads is not None
    offer(submit(harness, "one"))
    finish(harness, "one")
    # In a millisecond, a byte for each token.
    assert loads.costs._peer.value == pytest.approx((WHOLE_PAGES + 4) * PAGE / 0.001)


def test_a_request_that_ends_in_the_middle_leaves_nothing_held() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch)
    harness.plan()
    assert harness.worker.open
    harness.core.abort(RequestId("one"))
    harness.check_accounts()
    assert pool_of(harness).moving == 1, "the transfer still writes to it"
    harness.run()
    harness.audit()
    assert fetch.is_done
    assert pool_of(harness).moving == 0
    assert harness.core.memory.cache.protected_pages == 0


def test_lost_workers_take_the_states_with_them() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch)
    harness.plan()
    harness.lose_workers()
    harness.check_accounts()
    assert fetch.is_done
    assert pool_of(harness).moving == 0
    assert finish(harness, "one") == 0
    assert prefilled(harness) >= len(PROMPT)


def test_the_slot_of_a_lease_is_kept_until_it_ends() -> None:
    harness = make_harness(snapshots=12)
    core, request = harness.core, make_request("one", PROMPT)
    core.submit(request, 0.0)
    harness.run()
    assert core.exports.lend_state(b"lease") is None, "it has no pages"
    pin = core.exports.pin(b"lease", request.view, request.token_ids, 0, None)
    assert pin is not None
    slot = core.exports.lend_state(b"lease")
    assert slot is not None
    assert core.exports.lend_state(b"lease") is None, "once for a lease"
    pool = pool_of(harness)
    # Neither eviction nor forgetting gives it to others.
    pool.forget_subject(request.view.subject)
    core.memory.flush()
    assert pool.moving == 1
    MemoryChecks(core).check()
    pool.repair()
    others = [*(pool.try_allocate() for _ in range(6)), *(pool.try_reserve() for _ in range(5))]
    assert None not in others
    assert slot not in others
    core.exports.release(b"lease")
    assert pool.try_reserve() == slot


def test_states_of_another_view_are_not_lent() -> None:
    harness = make_harness(cache="user_aware")
    core, request = harness.core, make_request("one", PROMPT)
    core.submit(request, 0.0)
    harness.run()
    pin = core.exports.pin(b"lease", request.view, request.token_ids, 0, None)
    assert pin is not None
    pool, other = pool_of(harness), make_request("x", PROMPT, user="bob").view
    scope = harness.cache.view_of(other)
    assert scope is not None
    assert pool.try_lend_last(pin.pages, scope) is None
    assert pool.try_lend_last(pin.pages[:-1], harness.cache.view_of(request.view) or ()) is None
    core.exports.release(b"lease")
    harness.audit()


class RandomPeers:
    """Requests of a few users, another group that computes some of their prompts, and the order of events."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.harness = make_harness(
            snapshots=self.random.choice([2, 4, 9, 20]), pages=self.random.choice([20, 28, 60]),
            host_pages=self.random.choice([2, 30]), cache="user_aware", ranks=2,
        )  # fmt: skip
        self.prompts: dict[int, list[int]] = {}
        self.fetches: dict[int, PeerFetch] = {}
        self.arrived = 0

    def submit(self, number: int) -> None:
        """Submit a request, whose prompt may begin as others do, and ask the other group for it, if it is long."""
        random, core = self.random, self.harness.core
        length, shared = random.randint(8, 48), random.randint(0, 30)
        prompt = (list(range(100, 100 + shared)) + [random.randint(200, 400) for _ in range(length)])[:length]
        request = make_request(f"{number}", prompt, user=random.choice("abc"), max_tokens=random.randint(1, 8))
        if core.submit(request, self.harness.now).rejected is not None or random.random() < 0.2:
            return
        if (fetch := await_peer(self.harness, f"{number}")) is not None:
            self.prompts[number], self.fetches[number] = prompt, fetch

    def answer(self) -> None:
        """Let the other group offer some more pages, or fail."""
        random = self.random
        readable, has_states = random.choice([None, None, None, 0, 2]), random.random() < 0.8
        self.harness.worker.read_peer = lambda peer: lend(self.prompts, peer, readable)
        self.harness.worker.read_peer_states = lambda peer: lend_states(self.prompts, peer) if has_states else []
        for number, fetch in list(self.fetches.items()):
            whole, begin = (len(self.prompts[number]) - 1) // PAGE, len(fetch.offered)
            if fetch.is_done or random.random() < 0.05:
                self.arrived += fetch.has_states
                fetch.stop()
                del self.fetches[number]
            elif fetch.is_complete:
                continue
            elif random.random() < 0.7:
                end = min(whole, begin + random.randint(0, 5))
                offer(fetch, end, is_last=end > 0 and (end == whole or random.random() < 0.1), prompt=number)

    def go_on(self) -> None:
        """Plan, and let some transfers and passes end."""
        self.harness.plan()
        self.harness.check_accounts()
        for transfer_id, opened in list(self.harness.worker.open.items()):
            if self.random.random() < 0.6:
                self.harness.complete(transfer_id, self.random.choice(sorted(opened.ranks)))
        if self.random.random() < 0.8:
            self.harness.result()
        self.harness.audit()
        assert isinstance(self.harness.cache, RadixCache)
        assert violations(self.harness.cache) == []

    def end(self) -> None:
        """Let the other group fail, and all requests end."""
        for fetch in self.fetches.values():
            fetch.stop()
        self.harness.run()
        self.harness.audit()
        assert self.harness.cache.protected_pages == 0
        assert pool_of(self.harness).moving == pool_of(self.harness).held == 0


@pytest.mark.parametrize(
    "seeds", [range(10), *(pytest.param(range(n, n + 30), marks=pytest.mark.extended) for n in (10, 40))]
)
def test_random_prompts_arrive_beside_rows_evictions_forgetting_and_losses(seeds: range) -> None:
    arrived = 0
    for seed in seeds:
        peers = RandomPeers(seed)
        for step in range(60):
            if peers.random.random() < 0.3:
                peers.submit(step)
            peers.answer()
            if peers.random.random() < 0.05:
                peers.harness.core.abort(RequestId(f"{peers.random.randint(0, step)}"))
            if peers.random.random() < 0.03:
                view = make_request("x", [1], user=peers.random.choice("abc")).view
                peers.harness.core.memory.forget(view.subject, None)
            if peers.random.random() < 0.02:
                peers.harness.lose_workers()
            peers.go_on()
        peers.end()
        arrived += peers.arrived
    assert arrived >= 10
