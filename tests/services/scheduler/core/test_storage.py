"""Requests whose prefix is in storage: who finds it, who waits for it, and that all KV they read is right."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode, RequestId, View
from services.scheduler.cache.config import CacheConfig, Mode
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.node import Account
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, PrefetchPolicy, StorageConfig
from services.scheduler.core.load_back import MEASURED_ONE_IN, MEASURED_PAGES
from services.scheduler.storage_desk import Keyring
from tests.fakes.simulated_worker import expected_output
from tests.fakes.storing_worker import DROP, FETCH, Objects, storing
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_images import CAT, DOG, ask

if TYPE_CHECKING:
    from pathlib import Path

    from common.transfers import TransferDirection

PROMPT = list(range(100, 148))  # twelve pages, of which eleven can be found
WAIT = StorageConfig(PrefetchPolicy.WAIT_COMPLETE, min_pages=2)


class Server:
    """A scheduler with workers, beside others with the same storage and keyring file."""

    def __init__(
        self,
        keyring: Path,
        objects: Objects,
        config: StorageConfig = WAIT,
        host_pages: int = 64,
        host_snapshots: int = 0,
        **options: object,
    ) -> None:
        self.harness = Harness(host=HostConfig(host_pages, host_snapshots), **options)  # type: ignore[arg-type]
        self.worker = storing(self.harness.worker, objects)
        self.harness.worker = self.worker
        cache = self.harness.cache
        assert isinstance(cache, RadixCache)
        assert cache.host is not None
        self.cache, self.keyring = cache, Keyring(keyring)
        cache.host.add_storage(config, self.keyring)
        assert cache.host.storage is not None
        self.storage = cache.host.storage

    def serve(
        self,
        name: str,
        prompt: list[int] | None = None,
        user: str = "alice",
        mode: CacheMode = CacheMode.DEFAULT,
        max_tokens: int = 2,
    ) -> int:
        """Serve one request to its end and return how many of its tokens were cached."""
        prompt = PROMPT if prompt is None else prompt
        request = make_request(name, prompt, user=user, max_tokens=max_tokens, cache_mode=mode)
        assert self.harness.core.submit(request, self.harness.now).rejected is None
        self.finish()
        assert self.harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
        return self.harness.cached[name, 0]

    def finish(self) -> None:
        """Go on until nothing is left to do, transfers included."""
        self.harness.run()
        self.harness.audit()
        assert violations(self.cache) == []
        assert not self.storage._reads._fetches

    def replace_workers(self) -> None:
        """Lose all workers with their memory; new ones have the same storage."""
        self.harness.lose_workers()
        self.worker = storing(self.harness.worker, self.worker.objects)
        self.harness.worker = self.worker

    def restart(self) -> None:
        """Lose the workers and start to record plans again."""
        storage_us = self.worker.storage_us
        self.replace_workers()
        self.worker.storage_us = storage_us
        self.harness.plans.clear()

    def directions(self) -> list[TransferDirection]:
        return [transfer.direction for plan in self.harness.plans for transfer in plan.transfers]


def test_stored_pages_are_found_at_another_server_by_the_same_user_only(keyring: Path) -> None:
    objects: Objects = {}
    first = Server(keyring, objects)
    assert first.serve("cold") == 0
    assert len(objects) == 12
    second = Server(keyring, objects)
    assert second.serve("stranger", user="bob") == 0
    assert second.serve("warm") == 44
    assert second.storage.fetched_pages == 11


def test_lookups_of_many_new_users_in_one_plan_cost_one_write_of_the_keyring(keyring: Path) -> None:
    """Each write waits for the disk, and all requests for the scheduler."""
    server, users = Server(keyring, {}), [f"user{number}" for number in range(10)]
    for user in users:
        server.harness.core.submit(make_request(user, PROMPT, user=user, max_tokens=2), 0.0)
    # SQLite counts the transactions that write in the header of the file.
    before = keyring.read_bytes()[24:28]
    server.harness.plan()
    assert [len(plan.transfers) for plan in server.harness.plans] == [len(users)]
    assert int.from_bytes(keyring.read_bytes()[24:28]) == int.from_bytes(before) + 1
    server.finish()
    assert set(server.harness.cached) == {(user, 0) for user in users}


def test_after_a_restart_of_everything_the_prefix_is_still_there(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    server.serve("cold")
    server.replace_workers()
    assert server.serve("warm") == 44


def test_two_ranks_use_only_stored_pages_that_both_have(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects, ranks=2).serve("cold")
    assert len(objects) == 24
    server = Server(keyring, objects, ranks=2)
    order = [key for rank, key in objects if rank == 1]
    del objects[1, order[5]]
    assert server.serve("warm") == 20


def test_a_conversation_goes_on_at_another_server(keyring: Path) -> None:
    objects: Objects = {}
    first, second = Server(keyring, objects), Server(keyring, objects)
    first.serve("one", max_tokens=9)
    longer = [*PROMPT, *first.harness.outputs["one", 0], *range(500, 520)]
    assert second.serve("two", longer) >= 48
    assert first.serve("three", [*longer, *range(600, 610)]) >= 64


def test_no_cache_touches_no_tier(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    assert server.serve("cold", mode=CacheMode.NONE) == 0
    assert objects == {}
    server.serve("kept")
    server.worker.looked_up.clear()
    other = Server(keyring, objects)
    assert other.serve("none", mode=CacheMode.NONE) == 0
    assert other.directions() == []


@pytest.mark.parametrize("mode", ["isolated", "isolated_pinned", "user_aware"])
def test_keys_that_are_looked_up_are_the_requesters_own_its_tenants_and_the_publics(keyring: Path, mode: str) -> None:
    """A salt computed and never passed on would have all users ask under one name."""
    objects: Objects = {}
    asked = []
    for user in ("alice", "bob"):
        server = Server(keyring, objects, cache=mode)
        server.serve("r", user=user)
        asked.append(set(server.worker.looked_up))
        assert set(server.worker.stored).isdisjoint(set().union(*asked[:-1]))
    shared = asked[0] & asked[1]
    # The public's name and, where tenants share, the tenant's.
    assert len(shared) == {"isolated": 0, "isolated_pinned": 1, "user_aware": 2}[mode]


def let_tenant_share(server: Server) -> None:
    """Have three users compute the prompt."""
    for user in ("alice", "bob", "carol"):
        server.serve(f"{user}-computes", user=user)
    server.cache.advance(server.cache.epoch + 1)
    server.serve("anybody", [1, 2, 3])
    server.finish()


@pytest.fixture
def shared(keyring: Path) -> tuple[Server, Objects]:
    objects: Objects = {}
    server = Server(keyring, objects, cache="user_aware", pages=128, rules=CacheConfig(mode=Mode.USER_AWARE))
    let_tenant_share(server)
    return server, objects


def test_a_tenant_s_shared_pages_are_found_by_its_subjects_at_another_server(
    shared: tuple[Server, Objects], keyring: Path
) -> None:
    other = Server(keyring, shared[1], cache="user_aware", pages=128)
    assert other.serve("dave", user="dave") == 44
    fetched = other.storage.fetched_pages
    assert other.serve("erin", user="erin") == 44
    assert other.storage.fetched_pages == fetched, "shared pages are there once"


def test_stored_pages_of_a_demoted_prefix_are_no_longer_shared(shared: tuple[Server, Objects], keyring: Path) -> None:
    server, objects = shared
    (node,) = [node for node, _ in server.cache.store.tree.walk() if node.is_shared]
    server.cache._demoter.demote(node)
    for user, cached in (("dave", 0), ("alice", 44)):
        assert Server(keyring, objects, cache="user_aware").serve(user, user=user) == cached


def test_shared_pages_that_were_not_demoted_are_stored_under_their_new_name(
    shared: tuple[Server, Objects], keyring: Path
) -> None:
    server, objects = shared
    (tenant,) = server.cache.store.accounts.tenants()
    server.keyring.revoke(tenant.scope)
    assert Server(keyring, objects, cache="user_aware").serve("dave", user="dave") == 0
    server.storage.demote(tenant)
    server.serve("anything", [1, 2, 3])
    server.finish()
    assert Server(keyring, objects, cache="user_aware").serve("erin", user="erin") == 44


def test_a_distrusted_subject_finds_no_shared_pages_in_storage(shared: tuple[Server, Objects], keyring: Path) -> None:
    other = Server(keyring, shared[1], cache="user_aware", pages=128)
    other.storage.distrust([Account(("tenant", "mallory", "")).fingerprint])
    assert other.serve("mallory", user="mallory") == 0
    assert other.serve("dave", user="dave") == 44


def test_forgetting_a_subject_drops_its_stored_pages(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    server.serve("alice")
    server.serve("bob", user="bob")
    server.cache.forget(make_request("x", PROMPT).view.subject)
    server.serve("other", [1, 2, 3], user="bob")
    server.finish()
    assert DROP in server.directions()
    assert len(objects) == 12 + 1
    assert Server(keyring, objects).serve("alice") == 0
    assert Server(keyring, objects).serve("bob", user="bob") == 44


def test_pages_that_survive_a_forgotten_session_are_stored_under_new_names(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    server.serve("kept")
    server.cache.forget(make_request("x", PROMPT).view.subject, "some other session")
    server.serve("other", [1, 2, 3], user="bob")
    server.finish()
    assert len(objects) == 12 + 1
    assert Server(keyring, objects).serve("kept") == 44


def test_forgetting_includes_stored_pages_no_longer_in_memory(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("alice")
    server = Server(keyring, objects)
    server.cache.forget(make_request("x", PROMPT).view.subject)
    assert Server(keyring, objects).serve("alice") == 0


def under_the_names_of(new: Objects, old: Objects) -> Objects:
    """Return old objects under new names, as somebody does it who can write to the storage."""
    return dict(zip(new, old.values(), strict=False))


def test_a_backup_is_of_no_use_after_its_user_was_forgotten(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    server.serve("alice")
    backup = dict(objects)
    server.cache.forget(make_request("x", PROMPT).view.subject)
    objects.clear()
    objects.update(backup)
    assert Server(keyring, objects).serve("restored") == 0
    assert objects.keys() > backup.keys(), "what was computed again is stored beside it"
    new = {name: objects[name] for name in objects.keys() - backup.keys()}
    assert Server(keyring, under_the_names_of(new, backup)).serve("renamed") == 0
    assert Server(keyring, new).serve("new") == 44


def test_a_backup_is_of_no_use_after_a_demotion(shared: tuple[Server, Objects], keyring: Path) -> None:
    server, objects = shared
    backup = dict(objects)
    (node,) = [node for node, _ in server.cache.store.tree.walk() if node.is_shared]
    server.cache._demoter.demote(node)
    objects.update(backup)
    assert Server(keyring, objects, cache="user_aware").serve("dave", user="dave") == 0


def test_salted_views_do_not_share_stored_pages_and_are_forgotten_with_their_subject(keyring: Path) -> None:
    objects: Objects = {}

    def serve(server: Server, salt: str) -> int:
        request = make_request(salt, PROMPT, max_tokens=2)
        request = replace(request, view=View(request.view.subject, salt))
        assert server.harness.core.submit(request, server.harness.now).rejected is None
        server.finish()
        return server.harness.cached[salt, 0]

    server = Server(keyring, objects)
    assert [serve(server, salt) for salt in ("", "one", "two")] == [0, 0, 0]
    assert [serve(Server(keyring, objects), salt) for salt in ("one", "other")] == [44, 0]
    # Only one of the views is in its memory.
    last = Server(keyring, objects)
    serve(last, "two")
    last.cache.forget(make_request("x", PROMPT).view.subject)
    assert [serve(Server(keyring, dict(objects)), salt) for salt in ("", "one", "two")] == [0, 0, 0]


def test_all_views_of_a_forgotten_subject_are_dropped(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    for salt in ("", "one"):
        request = make_request(f"r{salt}", PROMPT, max_tokens=2)
        server.harness.core.submit(replace(request, view=View(request.view.subject, salt)), server.harness.now)
        server.finish()
    assert len(objects) == 24
    server.cache.forget(make_request("x", PROMPT).view.subject)
    server.serve("other", [1, 2, 3], user="bob")
    server.finish()
    assert len(objects) == 1


def test_without_the_keyring_nothing_is_found(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    assert Server(keyring, dict(objects)).serve("warm") == 44
    keyring.unlink()
    assert Server(keyring, objects).serve("lost") == 0


def test_two_ranks_use_only_stored_pages_that_both_can_decrypt(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects, ranks=2).serve("cold")
    order = [name for name in objects if name[0] == 1]
    objects[order[5]] = b"forged" * 6, objects[order[5]][1]
    server = Server(keyring, objects, ranks=2)
    assert server.serve("warm") == 20


def test_storage_that_is_down_gives_misses(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects)
    server.worker.is_down = True
    assert server.serve("missed") == 0
    server.worker.is_down = False
    assert server.serve("bob", user="bob") == 0
    assert server.serve("again") == 44, "from the device"


def submit_while_storage_is_slow(keyring: Path, policy: PrefetchPolicy) -> Server:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects, StorageConfig(policy, wait_s=1.0, min_pages=2))
    server.harness.core.submit(make_request("r", PROMPT), 0.0)
    for _ in range(5):
        server.harness.plan()
        server.harness.result()
    return server


def test_best_effort_starts_without_waiting_for_storage(keyring: Path) -> None:
    server = submit_while_storage_is_slow(keyring, PrefetchPolicy.BEST_EFFORT)
    assert server.harness.cached["r", 0] == 0
    server.finish()


@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_other_prefetch_policies_wait_for_the_stored_pages(keyring: Path, policy: PrefetchPolicy) -> None:
    server = submit_while_storage_is_slow(keyring, policy)
    assert ("r", 0) not in server.harness.cached
    server.finish()
    assert server.harness.cached["r", 0] == 44


def test_with_a_timeout_the_wait_ends(keyring: Path) -> None:
    server = submit_while_storage_is_slow(keyring, PrefetchPolicy.TIMEOUT)
    server.harness.now = 1.0
    for _ in range(3):
        server.harness.plan()
        server.harness.result()
    assert server.harness.cached["r", 0] == 0
    server.finish()


def test_with_prefetch_off_storage_is_not_asked(keyring: Path) -> None:
    server = submit_while_storage_is_slow(keyring, PrefetchPolicy.OFF)
    assert FETCH not in server.directions()
    server.finish()


def test_others_decode_while_one_waits(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects)
    server.harness.core.submit(make_request("runs", [8, 9, 10], user="bob", max_tokens=30), 0.0)
    server.harness.plan()
    server.harness.result()
    server.harness.core.submit(make_request("waits", PROMPT), 0.0)
    before = len(server.harness.outputs["runs", 0])
    for _ in range(8):
        server.harness.plan()
        server.harness.result()
    assert len(server.harness.outputs["runs", 0]) > before + 4
    assert ("waits", 0) not in server.harness.cached
    server.finish()
    assert server.harness.cached["waits", 0] == 44


def test_an_abort_keeps_the_running_fetch_and_starts_no_other(keyring: Path) -> None:
    server = submit_while_storage_is_slow(keyring, PrefetchPolicy.WAIT_COMPLETE)
    server.harness.core.abort(RequestId("r"))
    server.finish()
    assert server.storage.fetched_pages == 1
    assert server.serve("again") == 44


def test_pages_in_flight_are_limited(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects, StorageConfig(PrefetchPolicy.WAIT_COMPLETE, min_pages=2, window_pages=3))
    assert server.serve("warm") == 44
    sizes = [len(t.host_pages) for plan in server.harness.plans for t in plan.transfers if t.direction is FETCH]
    assert max(sizes) == 3


def test_a_rate_limit_spreads_storage_reads_over_time(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    config = StorageConfig(PrefetchPolicy.WAIT_COMPLETE, min_pages=2, pages_per_s=2.0)
    server = Server(keyring, objects, config)
    server.harness.core.submit(make_request("r", PROMPT), 0.0)
    fetched = []
    for now in range(8):
        server.harness.now = float(now)
        for _ in range(6):
            server.harness.plan()
            server.harness.result()
            server.harness.complete_all()
        fetched.append(server.storage.fetched_pages)
    assert fetched[0] <= 2
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(fetched))
    server.finish()
    assert server.harness.cached["r", 0] == 44


def test_storage_writes_can_be_disabled(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects, StorageConfig(PrefetchPolicy.OFF, writes=False)).serve("cold")
    assert objects == {}


@pytest.mark.parametrize("host_pages", [1, 2, 5])
def test_the_smallest_host_tiers_serve(keyring: Path, host_pages: int) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects, host_pages=host_pages, pages=14)
    for number in range(4):
        server.serve(f"r{number}", user=("alice", "bob")[number % 2])


def test_requests_that_wait_while_workers_die_are_looked_up_again(keyring: Path) -> None:
    server = submit_while_storage_is_slow(keyring, PrefetchPolicy.WAIT_COMPLETE)
    server.replace_workers()
    server.finish()
    assert server.harness.cached["r", 0] == 44


def test_rows_whose_workers_died_go_on_from_storage(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    server = Server(keyring, objects)
    server.harness.core.submit(make_request("r", PROMPT, max_tokens=12), 0.0)
    for _ in range(12):
        server.harness.plan()
        server.harness.result()
        server.harness.complete_all()
    assert 0 < len(server.harness.outputs["r", 0]) < 12
    fetched = server.storage.fetched_pages
    server.replace_workers()
    server.finish()
    assert server.storage.fetched_pages > fetched
    assert server.harness.outputs["r", 0] == expected_output(PROMPT, 60, (STOP_ID,))


def known_to_be_slow(keyring: Path, policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT) -> Server:
    """Return a server of a fast model whose storage, with all prompts, takes a second for each read."""
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    config = StorageConfig(policy, wait_s=60.0, min_pages=2)
    server = Server(keyring, objects, config, prefill_tokens_per_s=1000.0)
    server.worker.storage_us = 1_000_000
    assert server.serve("measured") == 44
    server.restart()
    return server


def test_storage_that_is_slower_than_computing_is_not_read(keyring: Path) -> None:
    server = known_to_be_slow(keyring)
    assert server.serve("computed") == 0
    assert FETCH not in server.directions()
    loads = server.harness.core.memory.loads
    assert loads is not None
    assert loads.unread_tokens == 44


def test_storage_is_read_although_it_is_slower_if_that_is_asked_for(keyring: Path) -> None:
    server = known_to_be_slow(keyring, PrefetchPolicy.WAIT_COMPLETE)
    assert server.serve("read") == 44


@pytest.mark.parametrize(("policy", "cached"), [(PrefetchPolicy.TIMEOUT, 0), (PrefetchPolicy.WAIT_COMPLETE, 44)])
def test_what_was_read_is_loaded_although_that_is_slower_if_it_is_asked_for(
    keyring: Path, policy: PrefetchPolicy, cached: int
) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("cold")
    config = StorageConfig(policy, wait_s=60.0, min_pages=2)
    server = Server(keyring, objects, config, prefill_tokens_per_s=1000.0, load_bytes_per_s=1e-3)
    assert server.serve("read") == cached
    assert server.storage.fetched_pages == 11


def test_storage_that_has_become_faster_is_noticed_by_reads_that_no_request_waits_for(keyring: Path) -> None:
    server = known_to_be_slow(keyring)
    server.worker.storage_us = 1
    for number in range(10 * MEASURED_ONE_IN):
        server.restart()
        if server.serve(f"{number}"):
            break
        fetches = [one for plan in server.harness.plans for one in plan.transfers if one.direction is FETCH]
        is_measured = number % MEASURED_ONE_IN == MEASURED_ONE_IN - 1
        assert sum(one.pages for one in fetches) == (MEASURED_PAGES if is_measured else 0)
    else:
        pytest.fail("it was never read again")
    assert number > MEASURED_ONE_IN


def test_prompts_too_short_for_a_lookup_do_not_count_as_skipped(keyring: Path) -> None:
    server = known_to_be_slow(keyring)
    server.serve("short", PROMPT[:8])
    loads = server.harness.core.memory.loads
    assert loads is not None
    assert loads.unread_tokens == 0


def test_prefixes_with_a_picture_are_found_at_another_server_by_the_same_user_only(keyring: Path) -> None:
    objects: Objects = {}

    def cached(name: str, picture: bytes, user: str = "alice") -> int:
        server = Server(keyring, objects)
        request = ask(name, [1, 2], (picture, 21), list(range(100, 110)), user=user, max_tokens=2)
        assert server.harness.core.submit(request, server.harness.now).rejected is None
        server.finish()
        return server.harness.cached[request.request_id, 0]

    assert cached("cold", CAT) == 0
    assert cached("warm", CAT) == 32
    assert cached("stranger", CAT, user="bob") == 0
    # The first page of four tokens ends in the picture.
    assert cached("another picture", DOG) == 0
