"""Prompts whose pages another group computes and which arrive on the device: where, when, and who holds them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.transfers import TransferDirection
from common.types import RequestId
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.memory_checks import MemoryChecks
from tests.examples import one_in
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.transfers import PeerPages
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from tests.fakes.simulated_worker import Content

PAGE = 4
# Twelve pages, of which eleven may come from another group.
PROMPT = list(range(100, 148))
WHOLE_PAGES = 11
TO_DEVICE, TO_HOST = TransferDirection.PEER_TO_DEVICE, TransferDirection.PEER_TO_HOST
LOAD = TransferDirection.HOST_TO_DEVICE


def make_harness(pages: int = 40, host_pages: int = 40, **options: object) -> Harness:
    host = HostConfig(pages=host_pages, policy=WritePolicy.WRITE_THROUGH)
    return Harness(pages=pages, host=host, **options)  # type: ignore[arg-type]


def lend(prompts: Mapping[int, Sequence[int]], peer: PeerPages, readable: int | None = None) -> list[Content]:
    """Return the pages of the other group: number 1,000 * i + n is page n of prompt i; `readable` can be read."""
    return [
        [(prompts[page // 1000][at], at) for at in range(page % 1000 * PAGE, (page % 1000 + 1) * PAGE)]
        for page in peer.device_pages[:readable].tolist()
    ]


def submit(harness: Harness, name: str, prompt: Sequence[int] = PROMPT, user: str = "alice") -> PeerFetch:
    """Submit a request that waits for pages of another group."""
    harness.worker.read_peer = lambda peer: lend({0: prompt}, peer)
    assert harness.core.submit(make_request(name, list(prompt), user=user, max_tokens=2), harness.now).rejected is None
    sequence, loads = harness.core.leader_of(RequestId(name)), harness.core.memory.loads
    assert sequence is not None
    assert loads is not None
    fetch = loads.await_peer(sequence, PAGE)
    assert fetch is not None
    return fetch


def offer(fetch: PeerFetch, end: int = WHOLE_PAGES) -> None:
    """Offer pages up to `end`; with the last one the other group has computed the prompt."""
    fetch.offer(("worker",), b"lease", range(len(fetch.offered), end))
    if end == WHOLE_PAGES:
        fetch.complete(0.0)


def finish(harness: Harness, name: str, prompt: Sequence[int] = PROMPT) -> int:
    """Let all requests end, and return how many tokens of one were cached."""
    harness.run()
    assert harness.outputs[name, 0] == expected_output(list(prompt), len(prompt) + 2, (STOP_ID,))
    harness.audit()
    return harness.cached[name, 0]


def directions(harness: Harness) -> list[TransferDirection]:
    return [transfer.direction for plan in harness.plans for transfer in plan.transfers]


def prefilled(harness: Harness) -> int:
    """Return the number of prompt tokens that were computed."""
    return sum(chunk.length for plan in harness.plans for chunk in plan.prefills)


def test_pages_arrive_on_the_device_and_are_used_without_a_load() -> None:
    harness = make_harness()
    offer(submit(harness, "one"), 5)
    harness.run()
    sequence = harness.core.leader_of(RequestId("one"))
    assert sequence is not None
    assert sequence.remote is not None
    offer(sequence.remote)
    assert finish(harness, "one") == 0, "another group's work is no hit"
    assert directions(harness).count(TO_DEVICE) == 2
    assert not {TO_HOST, LOAD} & set(directions(harness))
    assert prefilled(harness) == len(PROMPT) - WHOLE_PAGES * PAGE
    assert harness.core.memory.loads is not None
    assert harness.core.memory.loads.host.fetched_pages == WHOLE_PAGES


def test_what_has_arrived_belongs_to_the_view_that_asked_for_it() -> None:
    harness = make_harness()
    offer(submit(harness, "one"))
    finish(harness, "one")
    view = make_request("x", PROMPT, user="bob").view
    assert harness.cache.peek(view, make_request("x", PROMPT).token_ids) == 0
    assert harness.cache.peek(make_request("x", PROMPT).view, make_request("x", PROMPT).token_ids) == WHOLE_PAGES * PAGE
    assert TransferDirection.DEVICE_TO_HOST in directions(harness), "they are backed up as any others"


def test_only_what_the_view_lacks_is_read() -> None:
    harness = make_harness()
    harness.core.submit(make_request("before", PROMPT[:24], max_tokens=2), 0.0)
    harness.run()
    fetch = submit(harness, "one")
    first = fetch.first
    assert 4 <= first < WHOLE_PAGES
    offer(fetch)
    assert finish(harness, "one") == first * PAGE
    (arrival,) = (one for plan in harness.plans for one in plan.transfers if one.direction is TO_DEVICE)
    assert arrival.pages == WHOLE_PAGES - first


def test_without_room_on_the_device_pages_arrive_on_the_host() -> None:
    harness = make_harness(pages=16)
    harness.core.submit(make_request("long", list(range(300, 330)), user="bob", max_tokens=30), 0.0)
    harness.plan()
    offer(submit(harness, "one"))
    assert finish(harness, "one") == 0
    assert TO_HOST in directions(harness)
    assert TO_DEVICE not in directions(harness)


def test_a_prefix_that_only_the_host_has_is_continued_there() -> None:
    harness = make_harness(pages=14)
    harness.core.submit(make_request("before", PROMPT[:24], max_tokens=2), 0.0)
    harness.run()
    harness.core.submit(make_request("flood", list(range(300, 348)), user="bob", max_tokens=2), 0.0)
    harness.run()
    fetch = submit(harness, "one")
    assert fetch.first >= 4
    offer(fetch)
    finish(harness, "one")
    assert TO_HOST in directions(harness)
    assert TO_DEVICE not in directions(harness)


def test_running_rows_take_pages_that_wait_for_the_rest_of_a_prompt() -> None:
    harness = make_harness(pages=16)
    harness.core.submit(make_request("long", list(range(300, 310)), user="bob", max_tokens=40), 0.0)
    harness.plan()
    fetch = submit(harness, "one")
    offer(fetch, 3)
    harness.run()
    assert ("long", 0) in harness.finishes
    assert harness.core.memory.retractions == 0
    assert not fetch.is_done, "what is missing can still come"
    offer(fetch)
    finish(harness, "one")
    assert TO_HOST in directions(harness)
    assert prefilled(harness) < 10 + len(PROMPT)


def test_running_rows_do_not_take_pages_that_are_being_written() -> None:
    harness = make_harness(pages=16)
    harness.core.submit(make_request("long", list(range(300, 310)), user="bob", max_tokens=40), 0.0)
    harness.plan()
    fetch = submit(harness, "one")
    offer(fetch, 3)
    for _ in range(60):
        harness.plan()
        harness.result()
    assert harness.core.memory.retractions
    assert fetch.is_transferring
    harness.complete_all()
    assert harness.core.memory.loads is not None
    assert not harness.core.memory.loads.host.peers.tables()
    harness.run()
    assert ("long", 0) in harness.finishes
    assert not fetch.is_done
    harness.audit()


def test_a_request_starts_in_pages_that_wait_for_the_rest_of_a_prompt_while_nothing_runs() -> None:
    harness = make_harness(pages=16)
    fetch = submit(harness, "one")
    offer(fetch, 1)
    harness.run()
    harness.core.submit(make_request("other", list(range(300, 330)), user="bob", max_tokens=4), 0.0)
    harness.run()
    assert ("other", 0) in harness.finishes
    assert not fetch.is_done


@pytest.mark.parametrize("readable", [0, 3])
def test_pages_that_cannot_be_read_are_computed_here(readable: int) -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    harness.worker.read_peer = lambda peer: lend({0: PROMPT}, peer, readable)
    offer(fetch)
    finish(harness, "one")
    assert not fetch.has_arrived
    assert prefilled(harness) == len(PROMPT) - readable * PAGE


def test_a_request_that_ends_in_the_middle_leaves_nothing_held() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5)
    harness.plan()
    assert harness.worker.open
    harness.core.abort(RequestId("one"))
    harness.check_accounts()
    harness.run()
    harness.audit()
    assert fetch.is_done
    assert harness.core.memory.cache.protected_pages == 0


def test_forgetting_the_subject_in_the_middle_keeps_nothing_of_it() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5)
    harness.run()
    request = make_request("one", PROMPT)
    harness.core.memory.forget(request.view.subject, None)
    offer(fetch)
    finish(harness, "one")
    assert harness.cache.peek(request.view, request.token_ids) == 0 or prefilled(harness) > PAGE


def test_the_device_can_be_given_back_while_a_request_waits() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5)
    harness.run()
    harness.core.hold_all(held=True)
    harness.core.give_back_memory(keeps_host=True)
    assert fetch.is_done
    harness.audit()


def test_repairing_a_leak_spares_the_pages_of_prompts_that_arrive() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5)
    harness.run()
    assert harness.core.rows.running == 0
    assert harness.core.memory.try_allocate(2) is not None, "a leak: no table has these pages"
    MemoryChecks(harness.core).check()
    assert harness.core.memory.leaked_pages == 2
    harness.audit()
    offer(fetch)
    finish(harness, "one")
    assert prefilled(harness) == len(PROMPT) - WHOLE_PAGES * PAGE


def test_repairing_a_leak_waits_for_other_groups_that_read_pages() -> None:
    harness = make_harness()
    core, request = harness.core, make_request("one", PROMPT)
    core.submit(request, 0.0)
    harness.run()
    pin = core.exports.pin(b"lease", request.view, request.token_ids, 0, None)
    assert pin is not None
    assert core.memory.try_allocate(2) is not None, "a leak: no table has these pages"
    MemoryChecks(core).check()
    assert (len(core.exports), core.memory.leaked_pages) == (1, 0)
    core.memory.flush()
    assert not np.any(core.memory.allocator.counts[pin.pages] == 0), "they may be read until the lease ends"
    core.exports.release(b"lease")
    MemoryChecks(core).check()
    assert core.memory.leaked_pages == 2
    harness.audit()


def test_lost_workers_take_the_pages_with_them() -> None:
    harness = make_harness()
    fetch = submit(harness, "one")
    offer(fetch, 5)
    harness.plan()
    harness.lose_workers()
    harness.check_accounts()
    assert fetch.is_done
    assert finish(harness, "one") == 0
    assert prefilled(harness) >= len(PROMPT)


class RandomPeers:
    """Requests of a few users, another group that computes some of their prompts, and the order of events: all random.

    What another group offers is in pages 1,000 * i + n for page n of prompt i.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.harness = make_harness(
            pages=self.random.choice([20, 28, 60]), host_pages=self.random.choice([2, 30]), cache="user_aware", ranks=2
        )
        self.prompts: dict[int, list[int]] = {}
        self.fetches: dict[int, PeerFetch] = {}

    def submit(self, number: int) -> None:
        """Submit a request, whose prompt may begin as others do, and ask the other group for it, if it is long."""
        random, core = self.random, self.harness.core
        length, shared = random.randint(8, 48), random.randint(0, 30)
        prompt = (list(range(100, 100 + shared)) + [random.randint(200, 400) for _ in range(length)])[:length]
        request = make_request(f"{number}", prompt, user=random.choice("abc"), max_tokens=random.randint(1, 8))
        if core.submit(request, self.harness.now).rejected is not None or random.random() < 0.2:
            return
        sequence, loads = core.leader_of(RequestId(f"{number}")), core.memory.loads
        assert sequence is not None
        assert loads is not None
        if (fetch := loads.await_peer(sequence, PAGE)) is not None:
            self.prompts[number], self.fetches[number] = prompt, fetch

    def answer(self) -> None:
        """Let the other group offer some more pages, or fail."""
        random = self.random
        readable = random.choice([None, None, None, 0, 2])
        self.harness.worker.read_peer = lambda peer: lend(self.prompts, peer, readable)
        for number, fetch in list(self.fetches.items()):
            whole, begin = (len(self.prompts[number]) - 1) // PAGE, len(fetch.offered)
            if fetch.is_complete or random.random() < 0.1:
                fetch.stop()
                del self.fetches[number]
            elif random.random() < 0.5:
                end = min(whole, begin + random.randint(0, 5))
                fetch.offer(("worker",), b"lease", range(1000 * number + begin, 1000 * number + end))
                if end == whole:
                    fetch.complete(self.harness.now)

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


@pytest.mark.parametrize("seed", one_in(3, range(40)))
def test_random_prompts_arrive_beside_rows_evictions_and_losses(seed: int) -> None:
    peers = RandomPeers(seed)
    for step in range(60):
        if peers.random.random() < 0.3:
            peers.submit(step)
        peers.answer()
        if peers.random.random() < 0.05:
            peers.harness.core.abort(RequestId(f"{peers.random.randint(0, step)}"))
        if peers.random.random() < 0.02:
            peers.harness.lose_workers()
        peers.go_on()
    peers.end()
    assert TO_DEVICE in directions(peers.harness)
