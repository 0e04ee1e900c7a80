"""Requests whose prompt another group computes while its beginning may be in storage: both tiers beside each other."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from common.transfers import TransferDirection
from common.types import RequestId
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.scheduler.core.test_storage import PROMPT, WAIT, Server

if TYPE_CHECKING:
    from pathlib import Path

    from common.transfers import PeerPages
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from tests.fakes.simulated_worker import Content
    from tests.fakes.storing_worker import Objects

PAGE = 4
# Of the prompt; the last token is always computed where it is decoded.
WHOLE_PAGES = 11


class Peer:
    """Another group that has computed PROMPT: its page n has the prompt's page n."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def lend(self, peer: PeerPages) -> list[Content]:
        pages: list[int] = peer.device_pages.tolist()
        self.read += pages
        return [[(PROMPT[at], at) for at in range(page * PAGE, (page + 1) * PAGE)] for page in pages]


def await_peer(server: Server, peer: Peer, name: str, user: str = "alice", min_tokens: int = 8) -> PeerFetch:
    """Submit a request for PROMPT, which waits for pages of the peer and looks its own up in storage."""
    server.worker.read_peer = peer.lend
    core = server.harness.core
    assert core.submit(make_request(name, PROMPT, user=user, max_tokens=2), server.harness.now).rejected is None
    sequence, loads = core.leader_of(RequestId(name)), core.memory.loads
    assert sequence is not None
    assert loads is not None
    fetch = loads.await_peer(sequence, min_tokens)
    assert fetch is not None
    return fetch


def offer(fetch: PeerFetch, end: int = WHOLE_PAGES, found_tokens: int = 0) -> None:
    """Offer the prompt's pages up to `end`, the last with which the call ends."""
    fetch.found_tokens = found_tokens
    fetch.offer(("worker",), b"lease", range(len(fetch.offered), end))
    fetch.is_complete = end == WHOLE_PAGES


def cached(server: Server, name: str) -> int:
    """Let a request end, and return how many of its prompt's tokens were cached."""
    server.finish()
    assert server.harness.outputs[name, 0] == expected_output(PROMPT, len(PROMPT) + 2, (STOP_ID,))
    return server.harness.cached[name, 0]


def storage_with(keyring: Path, tokens: int) -> Objects:
    """Return a storage with the first `tokens` tokens of the prompt, as alice had them computed."""
    objects: Objects = {}
    if tokens:
        Server(keyring, objects).serve("before", PROMPT[:tokens])
    return objects


def test_pages_of_a_peer_are_stored_and_found_after_a_restart_by_the_same_user_only(keyring: Path) -> None:
    """The peer may have no storage, or lose its pages before it has stored them."""
    objects: Objects = {}
    server, peer = Server(keyring, objects), Peer()
    offer(await_peer(server, peer, "cold"))
    assert cached(server, "cold") == 0
    assert peer.read == list(range(WHOLE_PAGES))
    assert Server(keyring, objects).serve("warm") == WHOLE_PAGES * PAGE
    assert Server(keyring, objects).serve("stranger", user="bob") == 0


def test_pages_that_storage_has_are_not_read_from_the_peer_again(keyring: Path) -> None:
    server, peer = Server(keyring, storage_with(keyring, 24)), Peer()
    fetch = await_peer(server, peer, "one")
    server.harness.run()
    assert server.storage.fetched_pages == 6
    assert not fetch.is_done, "the rest is expected from the peer"
    offer(fetch)
    assert cached(server, "one") == 24
    assert peer.read == list(range(6, WHOLE_PAGES))


@pytest.mark.parametrize("min_tokens", [4, 12, 40])
def test_a_prompt_that_storage_has_whole_waits_for_no_peer(keyring: Path, min_tokens: int) -> None:
    """Storage brings one page, then eight and then the rest, which is too short for a peer by itself."""
    server, peer = Server(keyring, storage_with(keyring, len(PROMPT))), Peer()
    fetch = await_peer(server, peer, "one", min_tokens=min_tokens)
    assert cached(server, "one") == WHOLE_PAGES * PAGE
    assert fetch.is_done
    assert peer.read == []


def test_a_rest_that_is_too_short_for_a_peer_is_computed_here(keyring: Path) -> None:
    server, peer = Server(keyring, storage_with(keyring, 24)), Peer()
    fetch = await_peer(server, peer, "one", min_tokens=24)
    assert cached(server, "one") == 24
    assert fetch.is_done
    assert peer.read == []


def test_what_storage_had_counts_as_cached_also_if_the_peer_fails_or_had_none_of_it(keyring: Path) -> None:
    server, peer = Server(keyring, storage_with(keyring, 24)), Peer()
    fetch = await_peer(server, peer, "failing")
    server.harness.run()
    fetch.stop()
    assert cached(server, "failing") == 24
    other = Server(keyring, storage_with(keyring, 24))
    fetch = await_peer(other, peer, "without")
    other.harness.run()
    offer(fetch, found_tokens=0)
    assert cached(other, "without") == 24


def test_another_users_stored_pages_are_read_from_the_peer_instead(keyring: Path) -> None:
    server, peer = Server(keyring, storage_with(keyring, len(PROMPT))), Peer()
    fetch = await_peer(server, peer, "bob", user="bob")
    server.harness.run()
    assert server.storage.fetched_pages == 0
    offer(fetch)
    assert cached(server, "bob") == 0
    assert peer.read == list(range(WHOLE_PAGES))
    assert TransferDirection.PEER_TO_DEVICE in server.directions(), "nothing more is expected from storage"


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_in_any_order_of_arrivals_the_tokens_are_right_and_nothing_leaks(keyring: Path, policy: PrefetchPolicy) -> None:
    from_both = 0
    for seed in range(60):
        random = Random(seed)
        stored = random.randrange(0, len(PROMPT) + 1)
        place = keyring.with_name(f"{seed}.db")
        server, peer = Server(place, storage_with(place, stored), StorageConfig(policy, min_pages=2)), Peer()
        server.worker.is_down = random.random() < 0.1
        fetch = await_peer(server, peer, "one", min_tokens=random.choice([4, 8, 24]))
        ends = sorted(random.sample(range(1, WHOLE_PAGES), 3))
        for end in [*ends, *([WHOLE_PAGES] if random.random() < 0.8 else [])]:
            for _ in range(random.randrange(6)):
                step(server, random)
            if not fetch.is_complete:
                offer(fetch, end)
        fetch.stop()
        count = cached(server, "one")
        assert count <= stored
        assert len(peer.read) == len(set(peer.read))
        from_both += bool(peer.read) and server.storage.fetched_pages > 0
        assert violations(server.cache) == []
    assert from_both > 5


def step(server: Server, random: Random) -> None:
    """Plan, finish a pass or let one rank be done with a transfer."""
    match random.randrange(3), list(server.worker.open):
        case 0, _:
            server.harness.plan()
        case 1, [*transfers] if transfers:
            server.harness.complete(transfers[0], 0)
        case _:
            server.harness.result()


def test_pages_of_a_peer_are_not_stored_where_nothing_is_to_be_written(keyring: Path) -> None:
    objects: Objects = {}
    config = StorageConfig(WAIT.policy, min_pages=2, writes=False)
    server, peer = Server(keyring, objects, config), Peer()
    offer(await_peer(server, peer, "one"))
    assert cached(server, "one") == 0
    assert objects == {}
