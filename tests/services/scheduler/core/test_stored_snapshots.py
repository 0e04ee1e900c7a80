"""Models with recurrent layers above storage: rows continue from the deepest snapshot that storage has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.types import Subject
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.keys import PagedKey, chain_hashes
from services.scheduler.cache.sharing.merging import compress_chains
from services.scheduler.cache.tiers import stored_states
from services.scheduler.cache.tiers.config import PrefetchPolicy
from services.scheduler.cache.tiers.stored_states import NEAR_PAGES, StateSearch, Step
from services.scheduler.storage_desk import Keyring
from tests.fakes.storing_worker import FETCH, FIND, STORE, Objects
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.core.test_storage import PROMPT, WAIT, Server

if TYPE_CHECKING:
    from pathlib import Path

    from common.transfers import Transfer
    from services.scheduler.cache.tiers.state_copies import StateCopies

PAGE_SIZE, INTERVAL = 4, 3
# Regular depths of the twelve pages, of which eleven can be found, and the last whole page before the last token.
DEPTHS = (3, 6, 9, 11)
# Also after the last page, as the prompt fills it: of use to longer prompts only.
ALL_DEPTHS = (*DEPTHS, 12)


def hybrid(keyring: Path, objects: Objects, **options: object) -> Server:
    fields = {"host_snapshots": 32, "snapshots": 32, "interval": INTERVAL, **options}
    return Server(keyring, objects, **fields)  # type: ignore[arg-type]  # whatever a test wants to change


def states_of(server: Server, objects: Objects) -> list[tuple[int, bytes]]:
    """Return the objects that hold snapshots, of all ranks, in the order in which they were stored."""
    return [(rank, key) for key in server.worker.stored_states for rank in range(server.worker.ranks)
            if (rank, key) in objects]  # fmt: skip


def depth_of(objects: Objects, name: tuple[int, bytes]) -> int:
    return len(objects[name][1]) // PAGE_SIZE


def copies_of(server: Server) -> StateCopies:
    assert server.cache.host is not None
    assert server.cache.host.states is not None
    return server.cache.host.states


def transfers(server: Server) -> list[Transfer]:
    return [transfer for plan in server.harness.plans for transfer in plan.transfers]


def test_snapshots_are_stored_beside_their_pages_and_found_at_another_server_by_the_same_user_only(
    keyring: Path,
) -> None:
    objects: Objects = {}
    first = hybrid(keyring, objects)
    assert first.serve("cold") == 0
    assert sorted(depth_of(objects, name) for name in states_of(first, objects)) == list(ALL_DEPTHS)
    assert len(objects) == 12 + 5
    assert first.storage.stored_snapshots == 5
    second = hybrid(keyring, objects)
    assert second.serve("stranger", user="bob") == 0
    assert not second.worker.searches, "the first page shows that there is nothing"
    assert second.serve("warm") == 44
    assert (second.storage.fetched_pages, second.storage.fetched_snapshots) == (11, 1)
    assert second.storage.unused_pages == 0


def test_after_a_restart_of_everything_the_next_turn_continues_after_the_last(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("first turn", max_tokens=8)
    answer = server.harness.outputs["first turn", 0]
    turn = [*PROMPT, *answer, *range(300, 310)]
    server.replace_workers()
    server.harness.plans.clear()
    assert server.serve("second turn", turn) == (len(PROMPT) + len(answer) - 1) // PAGE_SIZE * PAGE_SIZE
    # One search, the one page before it, the pages up to the snapshot, and this.
    kinds = [(one.direction, len(one.host_snapshots)) for one in transfers(server) if one.direction in (FIND, FETCH)]
    assert kinds == [(FETCH, 0), (FIND, 0), (FETCH, 0), (FETCH, 1)]


def test_after_a_short_answer_the_next_turn_continues_after_a_prompt_of_whole_pages(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("first turn", max_tokens=2)
    turn = [*PROMPT, *server.harness.outputs["first turn", 0], *range(300, 310)]
    server.replace_workers()
    assert server.serve("second turn", turn) == len(PROMPT)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_row_continues_from_an_earlier_snapshot_if_the_deepest_ones_are_lost(
    keyring: Path, ranks: int, lost: int
) -> None:
    """With two ranks, one has them all."""
    objects: Objects = {}
    first = hybrid(keyring, objects, ranks=ranks)
    first.serve("cold")
    names = [name for name in states_of(first, objects) if name[0] == ranks - 1]
    by_depth = {depth_of(objects, name): name for name in names}
    for depth in DEPTHS[-lost:]:
        del objects[by_depth[depth]]
    second = hybrid(keyring, objects, ranks=ranks)
    found = DEPTHS[-lost - 1] if lost < len(DEPTHS) else 0
    assert second.serve("warm") == found * PAGE_SIZE
    # The other pages were not read in vain.
    assert second.storage.fetched_pages == max(found, 1)
    assert second.storage.unused_pages == (not found)


def test_a_damaged_snapshot_is_a_miss_and_an_earlier_one_is_used(keyring: Path) -> None:
    """Its name exists, but it cannot be decrypted, as if it had been forged or cut."""
    objects: Objects = {}
    first = hybrid(keyring, objects)
    first.serve("cold")
    deepest = next(name for name in states_of(first, objects) if depth_of(objects, name) == DEPTHS[-1])
    objects[deepest] = b"another key", objects[deepest][1]
    second = hybrid(keyring, objects)
    assert second.serve("warm") == DEPTHS[-2] * PAGE_SIZE
    assert second.worker.looked_up_states[0] == deepest[1]
    assert len(second.worker.searches) == 2
    assert second.storage.unused_pages == DEPTHS[-1] - DEPTHS[-2]


def test_pages_that_are_missing_before_the_deepest_snapshot_leave_an_earlier_one(keyring: Path) -> None:
    objects: Objects = {}
    first = hybrid(keyring, objects)
    first.serve("cold")
    pages = first.worker.stored
    del objects[0, pages[7]]
    second = hybrid(keyring, objects)
    assert second.serve("warm") == 6 * PAGE_SIZE
    assert second.storage.unused_pages == 1


def test_a_snapshot_that_both_tiers_have_lost_comes_from_storage_without_its_pages(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("cold")
    states = copies_of(server)
    for pool in (states.device, states.host):
        while pool.kept:
            entry = next(iter(pool.all()))
            pool.leave(np.array([entry.page], np.int32), entry.owner.scope)
    server.harness.plans.clear()
    assert server.serve("warm") == 44
    fetched = [one for one in transfers(server) if one.direction is FETCH]
    assert [(len(one.host_pages), len(one.host_snapshots)) for one in fetched] == [(0, 1)]


def test_a_slot_is_not_given_to_others_while_its_snapshot_is_stored(keyring: Path) -> None:
    server = hybrid(keyring, {})
    states = copies_of(server)
    seen = 0
    for _ in range(60):
        server.harness.plan()
        storing = [opened.transfer for opened in server.worker.open.values() if opened.transfer.direction is STORE]
        for transfer in storing:
            for slot in transfer.host_snapshots.tolist():
                entry = next(entry for entry in states.host.all() if entry.slot == slot)
                assert entry.readers
                assert not entry.queued
                seen += 1
        if not server.harness.results and not server.worker.open:
            break
        server.harness.result()
        for transfer_id in list(server.worker.open):
            server.harness.complete(transfer_id, 0)
    server.finish()
    assert states.host.moving == 0


def test_with_writes_off_snapshots_are_read_and_not_stored(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    before = dict(objects)
    server = hybrid(keyring, objects, config=replace(WAIT, writes=False))
    assert server.serve("warm") == 44
    server.serve("another", list(range(300, 330)))
    assert objects == before


def test_without_prefetching_nothing_is_searched_for(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    server = hybrid(keyring, objects, config=replace(WAIT, policy=PrefetchPolicy.OFF))
    assert server.serve("computed") == 0
    assert not server.worker.searches
    assert not server.worker.looked_up


def test_a_snapshot_that_saves_too_few_pages_is_not_read(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    server = hybrid(keyring, objects, config=replace(WAIT, min_pages=4))
    server.serve("a beginning", PROMPT[: 7 * PAGE_SIZE + 1])
    server.worker.searches.clear()
    # Seven pages are there, and of the others there are four.
    found = server.serve("warm", PROMPT[: 12 * PAGE_SIZE])
    assert found == 44
    other = hybrid(keyring, objects, config=replace(WAIT, min_pages=5))
    other.serve("a beginning", PROMPT[: 7 * PAGE_SIZE + 1])
    other.worker.searches.clear()
    assert other.serve("computed", PROMPT[: 12 * PAGE_SIZE]) < 44
    assert not other.worker.searches


def test_forgetting_a_subject_drops_its_snapshots_and_makes_copies_of_them_unreadable(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("cold")
    kept = dict(objects)
    server.cache.forget(Subject("tenant", "alice"))
    server.finish()
    assert objects == {}
    server.worker.objects.update(kept)
    server.replace_workers()
    assert server.serve("again") == 0
    assert not server.worker.looked_up_states


def test_a_session_s_end_stores_the_other_snapshots_of_its_subject_again(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("cold")
    before = set(objects)
    server.cache.forget(Subject("tenant", "alice"), "another session")
    server.finish()
    assert not before & set(objects)
    assert len([key for key in server.worker.stored_states if (0, key) in objects]) == len(ALL_DEPTHS)
    server.replace_workers()
    assert server.serve("warm") == 44


def test_what_arrives_after_its_subject_was_forgotten_is_dropped(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    server = hybrid(keyring, objects)
    states = copies_of(server)
    harness = server.harness
    harness.core.submit(make_request("warm", PROMPT, max_tokens=2), 0.0)
    for _ in range(200):
        harness.plan()
        reading = [one for one in server.worker.open.values() if len(one.transfer.host_snapshots)]
        if reading:
            break
        harness.result()
        harness.complete_all()
    assert reading
    server.cache.forget(Subject("tenant", "alice"))
    harness.complete_all()
    assert states.host.kept == 0
    assert states.host.moving == 0
    server.finish()


def shared_rules() -> CacheConfig:
    return CacheConfig(promotion_subjects=2, headroom_share=0.0, quota_share=1.0)


def test_snapshots_of_a_tenant_s_text_are_found_by_all_its_subjects(keyring: Path) -> None:
    objects: Objects = {}
    options = {"cache": "user_aware", "rules": shared_rules()}
    first = hybrid(keyring, objects, **options)
    for user in ("alice", "bob"):
        first.serve(user, user=user)
    first.cache.advance(1)
    # The next one computes it, and leaves the snapshots of the shared pages.
    first.serve("carol", user="carol")
    first.finish()
    second = hybrid(keyring, objects, **options)
    # Within shared pages, others see regular depths only.
    assert second.serve("dora", user="dora") == 36
    assert second.storage.fetched_snapshots == 1


def test_snapshots_that_were_private_when_their_text_became_shared_remain_their_owner_s(keyring: Path) -> None:
    objects: Objects = {}
    options = {"cache": "user_aware", "rules": shared_rules()}
    first = hybrid(keyring, objects, **options)
    for user in ("alice", "bob"):
        first.serve(user, user=user)
    first.cache.advance(1)
    first.finish()
    assert hybrid(keyring, objects, **options).serve("stranger", user="dora") == 0
    assert hybrid(keyring, objects, **options).serve("own", user="alice") == 44


def test_lost_workers_leave_no_slot_behind(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    for steps in range(1, 12):
        server = hybrid(keyring, objects)
        server.harness.core.submit(make_request("warm", PROMPT, max_tokens=2), 0.0)
        for _ in range(steps):
            server.harness.plan()
            server.harness.result()
            server.harness.complete_all()
        server.harness.plan()
        server.replace_workers()
        states = copies_of(server)
        assert states.host.moving == states.device.moving == 0
        assert states.host.kept == 0
        server.finish()
        assert server.serve("again") == 44


def test_a_search_names_only_regular_depths_far_before_the_end_of_a_prompt() -> None:
    scopes = [("t", "u", ""), ("t",), ()]
    search = StateSearch(scopes, 5, NEAR_PAGES + 100, 30)
    depths = [30, 60, 90, *range(101, NEAR_PAGES + 101)]
    assert search.candidates() == [(depth, scope) for depth in depths for scope in reversed(scopes)]


@pytest.mark.parametrize(("earlier", "first"), [(90, 91), (None, 5)])
def test_if_there_is_none_near_the_end_all_depths_after_the_deepest_regular_one_are_searched(
    earlier: int | None, first: int
) -> None:
    found = None if earlier is None else (earlier, ("t",))
    search = StateSearch([("t",)], 5, 3 * NEAR_PAGES, 30)
    search.settle(5, has_pages=True)
    search.begin()
    search.end_search(found)
    assert search.found is None
    search.settle(5, has_pages=False)
    assert search.step is Step.SEARCH
    assert search.candidates() == [(depth, ("t",)) for depth in range(first, first + NEAR_PAGES)]
    search.begin()
    search.end_search(None)
    assert search.found == found
    assert search.is_done is (found is None)


def test_between_the_deepest_regular_one_and_the_last_pages_depths_are_searched_once() -> None:
    search = StateSearch([("t",)], 5, NEAR_PAGES + 100, 30)
    search.settle(5, has_pages=True)
    search.begin()
    search.end_search((90, ("t",)))
    assert [depth for depth, _ in search.candidates()] == list(range(91, 101))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_state_that_a_turn_left_is_found_if_the_next_turn_is_long(
    keyring: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """If it is damaged, the one before it is."""
    monkeypatch.setattr(stored_states, "NEAR_PAGES", 4)
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("first turn", PROMPT[:18], max_tokens=4)
    answer = server.harness.outputs["first turn", 0]
    depths = sorted({depth_of(objects, name) for name in states_of(server, objects)})
    assert depths == [3, 4, 5]
    for name in states_of(server, objects):
        if depth_of(objects, name) in depths[len(depths) - lost :]:
            objects[name] = b"another key", objects[name][1]
    turn = [*PROMPT[:18], *answer, *range(300, 340)]
    other = hybrid(keyring, objects)
    assert other.serve("second turn", turn) == depths[-1 - lost] * PAGE_SIZE


def test_without_slots_on_the_host_nothing_is_looked_up(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    server = hybrid(keyring, objects, host_snapshots=0)
    assert server.serve("computed") == 0
    assert not server.worker.looked_up


def test_the_rate_of_reading_counts_the_memory_of_a_snapshot(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    # In the first second, all pages and the snapshot; it takes the debt's time until there is one more.
    server = hybrid(keyring, objects, config=replace(WAIT, pages_per_s=12.0))
    assert server.serve("warm") == 44
    rate = server.storage._reads._rate
    assert rate.available(server.harness.now) == 12 - 11 - INTERVAL
    assert rate.available(server.harness.now + 1.0) == 12 - 11 - INTERVAL + 12


def slow_to_read(server: Server, tokens_per_s: float, pages_per_s: float) -> None:
    """Let the costs of computing and of storage be known."""
    loads = server.harness.core.memory.loads
    assert loads is not None
    for _ in range(20):
        loads.costs.saw_prefill(1000, 1000 / tokens_per_s)
        loads.costs.saw_storage_read(40 * PAGE_SIZE, 40, 40 / pages_per_s, 40 / pages_per_s)


def test_the_memory_of_a_snapshot_decides_whether_reading_pays(keyring: Path) -> None:
    """Eleven pages take less time to read than to compute, but not with a snapshot of as much memory as thirty."""
    objects: Objects = {}
    config = replace(WAIT, policy=PrefetchPolicy.TIMEOUT)
    for interval, expected in ((3, 44), (30, 0)):
        objects.clear()
        hybrid(keyring, objects, interval=interval).serve("cold")
        server = hybrid(keyring, objects, config=config, interval=interval)
        slow_to_read(server, tokens_per_s=10.0, pages_per_s=5.0)
        assert server.serve("warm") == expected
        assert bool(server.worker.searches) == bool(expected)
        assert server.harness.core.memory.loads is not None
        assert server.harness.core.memory.loads.unread_tokens == 44 - expected


def test_a_snapshot_that_is_found_too_early_to_pay_is_not_read(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("a beginning", PROMPT[: 3 * PAGE_SIZE + 1])
    server = hybrid(keyring, objects, config=replace(WAIT, policy=PrefetchPolicy.TIMEOUT))
    slow_to_read(server, tokens_per_s=10.0, pages_per_s=5.0)
    # A gain of three pages is less than the time to read them and a snapshot of as much memory.
    assert server.serve("computed") == 0
    assert len(server.worker.searches) == 1
    assert not server.worker.looked_up_states
    # Only what a search has to tell apart is read: the first page.
    assert server.storage.fetched_pages == 1


def test_a_node_that_is_split_before_it_is_stored_is_stored_whole(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects, config=replace(WAIT, window_pages=1))
    server.serve("cold")
    objects.clear()
    server.worker.stored.clear()
    node = next(node for node, _ in server.cache.store.tree.walk() if node.size > 6)
    server.storage.note(node)
    server.cache.store.split(node, 5)
    server.finish()
    assert len(server.worker.stored) == node.size + 5
    other = hybrid(keyring, objects)
    assert other.serve("warm") == 44


@pytest.mark.parametrize(("noted", "pages"), [(["pages"], 12), (["states"], 0), (["states", "pages"], 12)])
def test_a_node_that_is_joined_with_its_child_before_it_is_stored_is_stored(
    keyring: Path, noted: list[str], pages: int
) -> None:
    """`noted`: what is still to be stored of the node and of the child, if anything is."""
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("cold")
    worker, store = server.worker, server.cache.store
    for names in (worker.stored, worker.stored_states):
        names.clear()
    objects.clear()
    node = next(node for node, _ in store.tree.walk() if node.size > 6)
    upper = store.split(node, 5)
    for half, what in zip((upper, node), noted, strict=False):
        (server.storage.note if what == "pages" else server.storage.note_states)(half)
    compress_chains(store)
    assert upper.is_dead
    server.finish()
    assert (len(worker.stored), len(worker.stored_states)) == (pages, len(ALL_DEPTHS))
    assert len(objects) == pages + len(ALL_DEPTHS)


def test_a_forgotten_subject_s_snapshot_is_dropped_also_if_its_page_remains_as_others_have_it(keyring: Path) -> None:
    objects: Objects = {}
    options = {"cache": "user_aware", "rules": shared_rules(), "pages": 128}
    hybrid(keyring, objects, **options).serve("stored", user="alice")
    server = hybrid(keyring, objects, **options)
    for user in ("bob", "carol"):
        server.serve(user, user=user)
    server.cache.advance(1)
    server.finish()
    states, harness = copies_of(server), server.harness
    alice = ("tenant", "alice", "")
    for is_forgotten in (False, True):
        harness.core.submit(make_request(f"warm {is_forgotten}", PROMPT, max_tokens=1), 0.0)
        reading = False
        for _ in range(200):
            harness.plan()
            reading = any(len(one.transfer.host_snapshots) and one.transfer.direction is FETCH
                          for one in server.worker.open.values())  # fmt: skip
            if reading:
                break
            harness.result()
            harness.complete_all()
        assert reading
        if is_forgotten:
            server.cache.forget(Subject("tenant", "alice"))
        harness.complete_all()
        # The page is there, and of the tenant.
        assert any(entry.owner.scope == alice for entry in states.host.all()) is not is_forgotten
        server.finish()
        for pool in (states.device, states.host):
            pool.forget_subject(Subject("tenant", "alice"))
    assert states.host.moving == 0


def chains(server: Server) -> list[bytes]:
    tree = server.cache.store.tree
    return chain_hashes(PagedKey(np.array(PROMPT, np.int32), PAGE_SIZE).slice(0, 12), tree.page_bytes)


def test_snapshots_of_public_pages_are_stored_as_public_only_while_they_are_pinned(keyring: Path) -> None:
    objects: Objects = {}
    options = {"cache": "user_aware", "pages": 128}
    server = hybrid(keyring, objects, **options)
    server.cache.pin(np.array(PROMPT, np.int32))
    server.cache.advance(1)
    # The first one's snapshots are its own, as its row began before there were public pages.
    for user in ("alice", "carol"):
        server.serve(user, user=user)
    other = hybrid(keyring, objects, **options)
    assert other.serve("stranger", user="bob") == 36
    assert other.storage.fetched_snapshots == 1
    server.cache.unpin(np.array(PROMPT, np.int32))
    server.finish()
    stored = len(server.worker.stored_states)
    for node, _ in server.cache.store.tree.walk():
        server.storage.note(node)
    server.finish()
    suffixed = [chain + b" state" for chain in chains(server)]
    own = {name for user in ("alice", "carol") for name in Keyring(keyring).keys(("tenant", user, ""), suffixed).names}
    assert set(server.worker.stored_states[stored:]) <= own
    assert hybrid(keyring, objects, **options).serve("stranger", user="bob") == 0


def test_a_public_snapshot_belongs_to_the_reader_alone_where_its_page_is_a_tenant_s(keyring: Path) -> None:
    objects: Objects = {}
    options = {"cache": "user_aware", "rules": shared_rules(), "pages": 128}
    first = hybrid(keyring, objects, **options)
    first.cache.pin(np.array(PROMPT, np.int32))
    first.cache.advance(1)
    for user in ("alice", "carol"):
        first.serve(user, user=user)
    server = hybrid(keyring, objects, config=replace(WAIT, policy=PrefetchPolicy.OFF), **options)
    for user in ("bob", "erin"):
        server.serve(user, user=user)
    server.cache.advance(1)
    server.finish()
    server.storage.config = WAIT
    assert server.serve("reads", user="dora") == 36
    owners = {entry.owner.scope for entry in copies_of(server).host.all()}
    assert ("tenant", "dora", "") in owners
    assert ("tenant",) not in owners
