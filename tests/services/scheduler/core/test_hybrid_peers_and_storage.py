"""A prefill and a decode group with recurrent layers that share a storage: where the pages and states come from.

Pages and states come from storage to the host, or from the prefill group to the device; a row continues from states of
its own tokens only.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from common.types import RequestId, Subject
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.scheduler.core.test_storage import PROMPT, WAIT
from tests.services.scheduler.core.test_stored_snapshots import PAGE_SIZE, copies_of, hybrid, states_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.transfers import PeerPages
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from tests.fakes.simulated_worker import Content
    from tests.fakes.storing_worker import Objects

# Of the prompt; the last token is always computed where it is decoded.
WHOLE_PAGES = 11


class Roles:
    """Both groups, each of which has read and stored nothing yet; `read` are the pages that the decode group has read.

    Without `has_pages` or `has_states`, the workers of the prefill group lend none.
    """

    def __init__(self, keyring: Path, objects: Objects, config: StorageConfig = WAIT, **options: object) -> None:
        """`config` and `options` are those of the decode group; the other one stores nothing."""
        self.prefill = hybrid(keyring, objects, config=replace(WAIT, writes=False))
        self.decode = hybrid(keyring, objects, config=config, **options)
        self.read: list[int] = []
        self.state_reads = 0
        self.has_pages = self.has_states = True
        self._leases = 0

    def ask(
        self, name: str, prompt: list[int] = PROMPT, user: str = "alice", min_tokens: int = PAGE_SIZE
    ) -> PeerFetch | None:
        """Submit a request to the decode group, whose prompt is left to the prefill group if enough is missing."""
        worker, core = self.decode.worker, self.decode.harness.core
        worker.read_peer, worker.read_peer_states = self._lend, self._lend_states
        request = make_request(name, prompt, user=user, max_tokens=2)
        assert core.submit(request, self.decode.harness.now).rejected is None
        sequence, loads = core.leader_of(RequestId(name)), core.memory.loads
        assert sequence is not None
        assert loads is not None
        return loads.await_peer(sequence, min_tokens)

    def expect(self, name: str, prompt: list[int] = PROMPT, user: str = "alice", min_tokens: int = 4) -> PeerFetch:
        """Do the same for a prompt of which enough is missing."""
        fetch = self.ask(name, prompt, user, min_tokens)
        assert fetch is not None
        return fetch

    def compute(self, fetch: PeerFetch, prompt: list[int] = PROMPT, user: str = "alice") -> Iterator[None]:
        """Let the prefill group compute a prompt, and offer it in two parts; it keeps it until the fetch is done."""
        core, name = self.prefill.harness.core, f"prefill {self._leases}"
        self._leases += 1
        cached = self.prefill.serve(name, prompt, user, max_tokens=1)
        request = make_request(name, prompt, user=user)
        pin = core.exports.pin(name.encode(), request.view, request.token_ids, 0, None)
        assert pin is not None
        slot = core.exports.lend_state(name.encode())
        assert slot is not None
        pages: list[int] = pin.pages.tolist()
        fetch.found_tokens = cached
        for part in (pages[: len(pages) // 2], pages[len(pages) // 2 :]):
            fetch.offer(("worker",), name.encode(), part)
            yield
        fetch.offer_snapshot(slot)
        fetch.complete(0.0)
        yield
        core.exports.release(name.encode())

    def finish(self, name: str, prompt: list[int] = PROMPT) -> int:
        """Let all requests of the decode group end; return the number of cached tokens of one."""
        self.decode.finish()
        assert self.decode.harness.outputs[name, 0] == expected_output(prompt, len(prompt) + 2, (STOP_ID,))
        self.check()
        return self.decode.harness.cached[name, 0]

    def check(self) -> None:
        """Neither group holds anything once nothing is going on."""
        for server in (self.prefill, self.decode):
            server.harness.audit()
            states = copies_of(server)
            assert states.device.moving == states.device.held == states.host.moving == 0
            assert server.cache.protected_pages == 0
            assert not server.worker.open

    def run(self, name: str, prompt: list[int] = PROMPT, user: str = "alice") -> int:
        """Serve one request, whose prompt the prefill group computes at once; return its cached tokens."""
        fetch = self.expect(name, prompt, user)
        for _ in self.compute(fetch, prompt, user):
            self.decode.harness.run()
        return self.finish(name, prompt)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that the decode group has computed."""
        return sum(chunk.length for plan in self.decode.harness.plans for chunk in plan.prefills)

    def _lend(self, peer: PeerPages) -> list[Content]:
        pages: list[int] = peer.device_pages.tolist()
        self.read += pages
        return [self.prefill.worker._device_page(page) for page in pages] if self.has_pages else []

    def _lend_states(self, peer: PeerPages) -> list[list[int]]:
        assert self.prefill.worker.snapshots is not None
        self.state_reads += 1
        slots = peer.device_snapshots.tolist() if self.has_states else []
        return [self.prefill.worker.snapshots[slot] for slot in slots]


def storage_with(keyring: Path, tokens: int, user: str = "alice") -> Objects:
    """Return a storage with the first `tokens` tokens of the prompt, as a user had them computed."""
    objects: Objects = {}
    if tokens:
        hybrid(keyring, objects).serve("before", PROMPT[:tokens], user=user)
    return objects


def test_states_of_a_peer_are_stored_and_found_after_a_restart_by_the_same_user_only(keyring: Path) -> None:
    """The prefill group may have no storage, or lose them before it has stored them."""
    objects: Objects = {}
    roles = Roles(keyring, objects)
    assert roles.run("cold") == 0
    assert roles.prefilled == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert roles.state_reads == 1
    assert states_of(roles.decode, objects)
    assert hybrid(keyring, objects).serve("warm") == WHOLE_PAGES * PAGE_SIZE
    assert hybrid(keyring, objects).serve("stranger", user="bob") == 0


@pytest.mark.parametrize("min_tokens", [4, 12, 40])
def test_a_prompt_that_storage_has_whole_waits_for_no_peer(keyring: Path, min_tokens: int) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    fetch = roles.expect("one", min_tokens=min_tokens)
    assert roles.finish("one") == WHOLE_PAGES * PAGE_SIZE
    assert fetch.is_done
    assert roles.read == []


def test_the_rest_of_a_prompt_that_storage_begins_comes_from_the_peer(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, 24))
    fetch = roles.expect("one")
    roles.decode.harness.run()
    assert roles.decode.storage.fetched_snapshots == 1
    assert not fetch.is_done
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    # Both groups have found it there.
    assert roles.finish("one") == 6 * PAGE_SIZE
    assert fetch.has_arrived
    assert roles.prefilled == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE


def test_what_a_peer_offers_while_storage_is_read_is_not_lost(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, 24))
    fetch = roles.expect("one")
    for _ in roles.compute(fetch):
        # Storage is slow.
        roles.decode.harness.plan()
    assert roles.finish("one") == 6 * PAGE_SIZE
    assert fetch.has_arrived
    assert roles.prefilled == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE


def test_the_rest_from_the_peer_is_not_awaited_once_storage_has_brought_the_prompt(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    fetch = roles.expect("one")
    parts = roles.compute(fetch)
    next(parts)
    harness = roles.decode.harness
    harness.run()
    assert fetch.is_done
    assert roles.decode.storage.fetched_snapshots == 1
    # The first pages were left with the peer while storage brought all to the host.
    assert roles.read == []
    for _ in parts:
        harness.run()
    assert roles.finish("one") == WHOLE_PAGES * PAGE_SIZE
    assert roles.state_reads == 0


@pytest.mark.parametrize("lost", ["pages", "states", "all"])
def test_a_lost_peer_leaves_what_storage_had(keyring: Path, lost: str) -> None:
    roles = Roles(keyring, storage_with(keyring, 24))
    roles.has_pages, roles.has_states = lost == "states", lost == "pages"
    fetch = roles.expect("one")
    roles.decode.harness.run()
    if lost == "all":
        fetch.stop()
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    assert roles.finish("one") == 6 * PAGE_SIZE
    assert not fetch.has_arrived
    assert roles.prefilled == len(PROMPT) - 6 * PAGE_SIZE


@pytest.mark.parametrize("is_down", [True, False])
def test_a_lost_storage_leaves_the_peer(keyring: Path, is_down: bool) -> None:
    """Either it does not answer, or it has lost all snapshots."""
    objects = storage_with(keyring, 24)
    roles = Roles(keyring, objects)
    roles.decode.worker.is_down = is_down
    first = hybrid(keyring, objects)
    first.serve("before", PROMPT[:24])
    largest = max(len(content) for _, content in objects.values())
    for name in [name for name, (_, content) in objects.items() if not is_down and len(content) == largest]:
        del objects[name]
    fetch = roles.expect("one")
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    roles.finish("one")
    assert fetch.has_arrived
    assert roles.prefilled == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE


def test_storage_that_is_lost_while_a_snapshot_is_read_leaves_the_peer(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, 24))
    fetch, harness = roles.expect("one"), roles.decode.harness
    while not roles.decode.worker.looked_up_states:
        harness.complete_all()
        harness.result()
        harness.plan()
    roles.decode.worker.is_down = True
    for _ in roles.compute(fetch):
        harness.run()
    roles.finish("one")
    assert roles.decode.storage.fetched_snapshots == 0
    assert fetch.has_arrived


def test_without_peer_and_storage_the_prompt_is_computed(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    roles.decode.worker.is_down, roles.has_pages = True, False
    fetch = roles.expect("one")
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    roles.decode.finish()
    assert roles.finish("one") == 0
    assert roles.prefilled == len(PROMPT)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_storage_has_is_used_if_the_peer_fails_after_it_has_offered_pages_first(keyring: Path, parts: int) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    fetch = roles.expect("one")
    offers = roles.compute(fetch)
    for _ in range(parts):
        next(offers)
    # Storage answers to nothing meanwhile.
    for _ in range(4):
        roles.decode.harness.plan()
        for transfer_id, opened in list(roles.decode.worker.open.items()):
            if opened.transfer.direction.is_from_peer:
                roles.decode.harness.complete(transfer_id, 0)
        roles.decode.harness.result()
    assert roles.read == []
    fetch.stop()
    roles.decode.finish()
    assert [*offers] == [None] * (3 - parts)
    assert roles.finish("one") == WHOLE_PAGES * PAGE_SIZE


@pytest.mark.parametrize("stored", [0, 24])
def test_once_storage_has_brought_what_it_has_the_first_pages_come_before_the_prompt_is_computed(
    keyring: Path, stored: int
) -> None:
    roles = Roles(keyring, storage_with(keyring, stored))
    fetch = roles.expect("one")
    offers = roles.compute(fetch)
    next(offers)
    roles.decode.harness.run()
    assert not fetch.is_complete
    assert roles.read == list(range(WHOLE_PAGES // 2))
    for _ in offers:
        roles.decode.harness.run()
    roles.finish("one")
    assert fetch.has_arrived


def test_once_the_peer_has_computed_the_prompt_nothing_waits_for_storage(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    fetch = roles.expect("one")
    offers = roles.compute(fetch)
    for _ in range(3):
        next(offers)
        for _ in range(2):
            roles.decode.harness.plan()
            roles.decode.harness.result()
        reads = [each.transfer.direction.is_from_peer for each in roles.decode.worker.open.values()]
        assert reads == ([False, True] if fetch.is_complete else [False])
    for _ in offers:
        pass
    roles.finish("one")
    assert fetch.has_arrived


def test_another_users_stored_states_are_found_by_neither_group(keyring: Path) -> None:
    roles = Roles(keyring, storage_with(keyring, len(PROMPT)))
    assert roles.run("bob", user="bob") == 0
    assert not roles.decode.worker.searches
    assert roles.prefill.storage.fetched_snapshots == roles.decode.storage.fetched_snapshots == 0
    assert len(roles.read) == WHOLE_PAGES
    # Nor has bob changed what alice finds.
    assert roles.decode.serve("alice") == WHOLE_PAGES * PAGE_SIZE


def test_a_beginning_that_only_the_host_has_left_comes_from_the_peer_again(keyring: Path) -> None:
    """The device's pages below it would otherwise have no beginning, and what the peer computed would be lost."""
    roles = Roles(keyring, {})
    roles.decode.serve("before", PROMPT[:24])
    roles.decode.cache.evict(64)
    before = roles.prefilled
    fetch = roles.expect("one")
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    assert roles.finish("one") == 6 * PAGE_SIZE
    assert fetch.has_arrived
    assert roles.prefilled - before == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE


def test_a_beginning_that_leaves_the_device_in_between_comes_from_the_peer_again(keyring: Path) -> None:
    roles = Roles(keyring, {})
    roles.decode.serve("before", PROMPT[:24])
    before = roles.prefilled
    fetch = roles.expect("one")
    roles.decode.cache.evict(64)
    for _ in roles.compute(fetch):
        roles.decode.harness.run()
    assert roles.finish("one") == 6 * PAGE_SIZE
    assert fetch.has_arrived
    assert roles.prefilled - before == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE


def test_forgetting_a_user_leaves_no_states_in_either_group_or_storage(keyring: Path) -> None:
    objects: Objects = {}
    roles = Roles(keyring, objects)
    roles.run("one")
    for server in (roles.prefill, roles.decode):
        server.harness.core.memory.forget(Subject("tenant", "alice"), None)
        server.finish()
        assert copies_of(server).device.kept == copies_of(server).host.kept == 0
    assert objects == {}
    assert roles.run("again") == 0


class RandomRoles:
    """One prompt of two users, and the order in which storage, the peer and evictions take their turns."""

    def __init__(self, keyring: Path, seed: int, policy: PrefetchPolicy) -> None:
        self.random = random = Random(seed)
        place = keyring.with_name(f"{seed}.db")
        objects = storage_with(place, random.choice([0, 24, 36, len(PROMPT)]))
        sizes = {"pages": random.choice([28, 64]), "host_pages": random.choice([6, 64]),
                 "snapshots": random.choice([3, 32]), "host_snapshots": random.choice([2, 32])}  # fmt: skip
        config = StorageConfig(policy, wait_s=0.0, min_pages=2)
        self.roles = Roles(place, objects, config, **sizes, ranks=random.choice([1, 1, 2]))
        if random.random() < 0.4:
            self.roles.decode.serve("before", PROMPT[: random.choice([16, 24, 40])])
        users = ["alice", "bob"] if random.random() < 0.5 else ["alice"]
        asked = {user: self.roles.ask(user, user=user) for user in users}
        self.fetches = {user: fetch for user, fetch in asked.items() if fetch is not None}
        self.users = users
        self._parts = {user: self.roles.compute(fetch, user=user) for user, fetch in self.fetches.items()}

    def step(self) -> None:
        """Let something happen in the decode group, or the prefill group offer more."""
        server, random = self.roles.decode, self.random
        host = server.cache.host
        assert host is not None
        match random.randrange(8), [*server.worker.open]:
            case 0 | 1, _:
                server.harness.plan()
            case 2 | 3, [first, *_]:
                server.harness.complete(first, min(server.worker.open[first].ranks))
            case 4, _ if self._parts:
                next(self._parts[random.choice([*self._parts])], None)
            case 5, _ if random.random() < 0.3:
                server.cache.evict(random.randrange(1, 12))
            case 5, _ if (pages := host.pages.try_allocate(random.randrange(1, 6))) is not None:
                host.pages.allocator.release(pages)
            case 6, _ if random.random() < 0.2:
                self.fail()
            case _:
                server.harness.result()
        server.harness.collect()
        server.harness.check_accounts()
        server.harness.audit()
        assert violations(server.cache) == []

    def fail(self) -> None:
        """Lose storage, the pages or states of the peer, or the calls to it."""
        match self.random.randrange(4):
            case 0:
                self.roles.decode.worker.is_down = True
            case 1:
                self.roles.has_pages = False
            case 2:
                self.roles.has_states = False
            case _:
                for fetch in self.fetches.values():
                    fetch.stop()

    def end(self) -> dict[str, int]:
        """Let the peer offer the rest or fail, and all requests end; return their cached tokens."""
        for user, parts in self._parts.items():
            for _ in parts:
                self.step()
            self.fetches[user].stop()
        return {user: self.roles.finish(user) for user in self.users}


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_in_any_order_of_arrivals_and_evictions_the_tokens_are_right_and_nothing_leaks(
    keyring: Path, policy: PrefetchPolicy
) -> None:
    arrived = from_both = 0
    for seed in range(60):
        life = RandomRoles(keyring, seed, policy)
        for _ in range(life.random.randrange(60)):
            life.step()
        cached = life.end()
        assert cached["alice"] <= WHOLE_PAGES * PAGE_SIZE
        assert cached.get("bob", 0) == 0
        arrived += any(fetch.has_states for fetch in life.fetches.values())
        from_both += bool(life.roles.read) and life.roles.decode.storage.fetched_snapshots > 0
    assert arrived > 5
    assert from_both > 2
