"""Models with recurrent layers over two tiers: rows continue from snapshots that were on the host, and from no others.

The simulated worker knows which tokens each slot has taken in, and finds accesses to one that is being copied.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from common.transfers import TransferDirection
from common.types import RequestId, Subject
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from services.scheduler.cache.tiers.state_copies import StateCopies

PROMPT = [(17 * position) % 900 + 10 for position in range(80)]
FLOOD = [(29 * position) % 900 + 11 for position in range(110)]
BACKUP, LOAD = TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE


def make_harness(**options: object) -> Harness:
    """Pages of 4 tokens, and a snapshot every 4 pages."""
    host = HostConfig(
        pages=options.pop("host_pages", 80),  # type: ignore[arg-type]  # whatever a test wants to change
        snapshots=options.pop("host_snapshots", 20),  # type: ignore[arg-type]  # likewise
        policy=options.pop("policy", WritePolicy.WRITE_THROUGH),  # type: ignore[arg-type]  # likewise
    )
    fields: dict[str, object] = {
        "pages": 32, "max_context": 120, "snapshots": 12, "interval": 4, "host": host, **options,
    }  # fmt: skip
    return Harness(**fields)  # type: ignore[arg-type]  # likewise


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 4, user: str = "alice") -> int:
    """Serve one request to its end; return the number of its cached tokens."""
    harness.core.submit(make_request(name, prompt, max_tokens=max_tokens, user=user), 0.0)
    harness.run()
    harness.audit()
    assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
    return harness.cached[name, 0]


def transfers(harness: Harness, direction: TransferDirection) -> list[tuple[int, int]]:
    """Return the numbers of pages and snapshots of each transfer."""
    return [
        (transfer.pages, len(transfer.host_snapshots))
        for plan in harness.plans
        for transfer in plan.transfers
        if transfer.direction is direction
    ]


def lose_snapshots(harness: Harness, *, on_host: bool, least_depth: int = 0) -> None:
    """Evict the snapshots of a tier after its pages from a depth on, and no page."""
    cache = harness.cache
    assert isinstance(cache, RadixCache)
    pool = host_states(harness).host if on_host else cache.snapshots
    assert pool is not None
    for node, depth in cache.store.tree.walk():
        pages = node.host_pages if on_host else node.pages
        if pages is not None:
            pool.leave(pages[max(least_depth - 1 - (depth - node.size), 0) :], node.owner.scope)
    harness.audit()


def host_states(harness: Harness) -> StateCopies:
    assert harness.cache.host is not None
    assert harness.cache.host.states is not None
    return harness.cache.host.states


def leave_device(harness: Harness) -> None:
    harness.cache.evict(harness.config.device_pages)
    assert harness.cache.snapshots is not None
    assert harness.cache.snapshots.kept == 0, "snapshots go with their pages"
    harness.audit()


@pytest.mark.parametrize("cache", ["shared", "isolated", "user_aware"])
def test_a_prefix_that_left_the_device_comes_back_with_its_deepest_snapshot(cache: str) -> None:
    harness = make_harness(cache=cache)
    assert serve(harness, "cold", PROMPT[:50]) == 0
    leave_device(harness)
    serve(harness, "flood", FLOOD[:70])
    assert serve(harness, "warm", PROMPT[:50]) == 48
    assert transfers(harness, LOAD) == [(12, 1)]
    # What is on the device again needs no load.
    assert serve(harness, "again", PROMPT[:50]) == 48
    assert len(transfers(harness, LOAD)) == 1


def test_only_pages_up_to_the_snapshot_are_loaded() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    # It diverges after nine pages, of which eight have a snapshot.
    assert serve(harness, "diverges", [*PROMPT[:38], *FLOOD[:10]]) == 32
    assert transfers(harness, LOAD) == [(8, 1)]


def test_a_snapshot_alone_is_loaded_for_pages_on_the_device() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    lose_snapshots(harness, on_host=False)
    assert serve(harness, "warm", PROMPT[:50]) == 48
    assert transfers(harness, LOAD) == [(0, 1)]
    # The end is on the host only, but the device has what another request needs.
    lose_snapshots(harness, on_host=False, least_depth=12)
    assert serve(harness, "shorter", PROMPT[:34]) == 32


def test_without_the_deepest_snapshot_a_row_continues_from_the_next_one_on_any_tier() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    lose_snapshots(harness, on_host=False)
    lose_snapshots(harness, on_host=True, least_depth=9)
    assert serve(harness, "from the host", PROMPT[:50]) == 32
    # The one after eight pages is on the device again; that after 12 was made again, and is lost there.
    lose_snapshots(harness, on_host=False, least_depth=9)
    lose_snapshots(harness, on_host=True)
    assert serve(harness, "from the device", PROMPT[:50]) == 32
    assert len(transfers(harness, LOAD)) == 1


def test_pages_on_the_host_are_of_no_use_without_a_snapshot() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    lose_snapshots(harness, on_host=True)
    assert serve(harness, "warm", PROMPT[:50]) == 0
    assert not transfers(harness, LOAD)
    # What was computed has replaced them, with snapshots.
    assert serve(harness, "again", PROMPT[:50]) == 48


def test_snapshots_that_come_after_their_pages_are_copied_alone() -> None:
    harness = make_harness()
    serve(harness, "first", PROMPT[:50])
    before = len(transfers(harness, BACKUP))
    # Saves where it diverges, within pages that have a copy.
    serve(harness, "second", [*PROMPT[:39], *FLOOD[:8]])
    assert (0, 1) in transfers(harness, BACKUP)[before:]
    leave_device(harness)
    assert serve(harness, "third", [*PROMPT[:36], *FLOOD[20:30]]) == 36


def test_a_copy_that_the_host_has_evicted_is_made_again_after_the_next_use() -> None:
    harness = make_harness()
    serve(harness, "first", PROMPT[:50])
    lose_snapshots(harness, on_host=True)
    before = len(transfers(harness, BACKUP))
    serve(harness, "other", FLOOD[:40])
    assert (0, 1) not in transfers(harness, BACKUP)[before:]
    serve(harness, "again", PROMPT[:50])
    # Of four snapshots one has been used.
    assert (0, 1) in transfers(harness, BACKUP)[before:]


def test_each_use_on_the_device_keeps_the_copy_on_the_host() -> None:
    harness = make_harness(host_snapshots=6, pages=80, max_context=120, snapshots=40)
    serve(harness, "hot", PROMPT[:18], max_tokens=1)
    for number in range(12):
        serve(harness, f"other {number}", [number + 1, *FLOOD[:17]], max_tokens=1)
        assert serve(harness, f"hot {number}", PROMPT[:18], max_tokens=1) == 16
    assert (0, 1) not in transfers(harness, BACKUP), "it has not been evicted, and so not been copied again"
    leave_device(harness)
    assert serve(harness, "hot from the host", PROMPT[:18], max_tokens=1) == 16


@pytest.mark.parametrize("has_host", [True, False])
def test_chats_of_several_turns_find_their_prefixes_over_the_host_tier(has_host: bool) -> None:
    """Eight chats take turns, of which the device holds two: without a host tier none finds anything."""
    pages, snapshots = (400, 200) if has_host else (0, 0)
    harness = make_harness(cache="user_aware", host_pages=pages, host_snapshots=snapshots, pages=48, snapshots=16)
    chats = {f"user {number}": [(7 * number + 31 * at) % 900 + 10 for at in range(22)] for number in range(8)}
    found, possible = 0, 0
    for turn in range(4):
        for user, ids in chats.items():
            cached = serve(harness, f"{user} {turn}", ids, max_tokens=12, user=user)
            found, possible = found + cached, possible + (len(ids) - 8 if turn else 0)
            if has_host and turn:
                # All of the last turn but for at most three pages: plans in flight delay the last save.
                assert cached >= len(ids) - 8 - 12
            chats[user] = [*ids, *harness.outputs[f"{user} {turn}", 0], *(turn * 8 + at + 3 for at in range(8))]
    assert found >= 0.85 * possible if has_host else found == 0


def test_a_load_for_which_the_device_has_no_pages_gives_its_slot_back() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    assert harness.cache.host is not None
    assert harness.cache.snapshots is not None
    request = make_request("warm", PROMPT[:50])
    assert harness.cache.host.load(request.view, request.token_ids, lambda _count: None) is None
    assert harness.cache.snapshots.moving == 0
    harness.audit()
    assert serve(harness, "warm", PROMPT[:50]) == 48


def test_copies_of_one_users_snapshots_are_not_found_by_another() -> None:
    harness = make_harness(cache="user_aware", pages=64, interval=100)
    serve(harness, "alice's", PROMPT[:50], max_tokens=1)
    assert serve(harness, "bob's", PROMPT[:58], max_tokens=1, user="bob") == 0
    harness.cache.advance(1)
    # Equal pages are merged; the copies on the host are not.
    leave_device(harness)
    assert serve(harness, "bob's second", PROMPT[:52], max_tokens=1, user="bob") == 0
    assert serve(harness, "alice's second", PROMPT[:52], max_tokens=1) == 48
    assert serve(harness, "stranger's", PROMPT[:52], max_tokens=1, user="carol") == 0


def test_a_forgotten_subject_has_no_snapshots_on_any_tier() -> None:
    harness = make_harness(cache="user_aware")
    serve(harness, "alice's", PROMPT[:50])
    serve(harness, "bob's", FLOOD[:50], user="bob")
    states = host_states(harness)
    others = [entry for entry in states.host.all() if entry.owner.scope[1] == "bob"]
    assert 0 < len(others) < states.host.kept
    harness.cache.forget(Subject("tenant", "alice"))
    assert list(states.host.all()) == others
    assert serve(harness, "again", PROMPT[:50]) == 0


def test_snapshots_that_are_on_their_way_when_their_subject_is_forgotten_do_not_arrive() -> None:
    harness = make_harness(cache="user_aware", pages=64)
    harness.core.submit(make_request("alice's", PROMPT[:50], max_tokens=1), 0.0)
    while not harness.worker.open:
        harness.plan()
        harness.result()
    (opened,) = harness.worker.open.values()
    assert len(opened.transfer.device_snapshots) > 0
    states = host_states(harness)
    assert states.host.moving == len(opened.transfer.host_snapshots)
    harness.cache.forget(Subject("tenant", "alice"))
    assert harness.cache.snapshots is not None
    # They are read until the copy is done, and so not granted again.
    assert harness.cache.snapshots.kept == 0
    assert harness.cache.snapshots.moving == len(opened.transfer.device_snapshots)
    # The simulated worker finds saves to them meanwhile.
    harness.core.submit(make_request("bob's", FLOOD[:90], user="bob"), 0.0)
    for _ in range(50):
        harness.plan()
        harness.result()
    assert ("bob's", 0) in harness.finishes, "while the copies are open"
    harness.run()
    harness.audit()
    assert all(entry.owner.scope[1] == "bob" for entry in states.host.all())
    assert states.host.moving == harness.cache.snapshots.moving == 0


@pytest.mark.parametrize("has_arrived", [False, True])
def test_private_snapshots_of_a_shared_text_are_forgotten_on_their_way_and_on_the_host(has_arrived: bool) -> None:
    harness = make_harness(cache="user_aware", pages=128, snapshots=60, host_snapshots=60)
    for user in ("alice", "bob", "carol"):
        harness.core.submit(make_request(user, PROMPT[:50], max_tokens=1, user=user), 0.0)
        while (user, 0) not in harness.finishes:
            harness.plan()
            harness.result()
    harness.plan()
    assert len(harness.worker.open) == 3
    if has_arrived:
        harness.run()
        assert [entry for entry in host_states(harness).host.all() if entry.owner.scope[1:2] == ("alice",)]
    # Alice's node becomes that of all, while it and her snapshots are being copied.
    harness.cache.advance(1)
    harness.audit()
    assert harness.cache.usage.tenant_pages == 12
    harness.cache.forget(Subject("tenant", "alice"))
    harness.run()
    harness.audit()
    assert harness.cache.usage.tenant_pages == 12, "the text stays"
    for pool in (harness.cache.snapshots, host_states(harness).host):
        assert pool is not None
        assert not [entry for entry in pool.all() if entry.owner.scope[1:2] == ("alice",)]


def test_each_owner_of_merged_pages_has_copies_of_its_own_snapshots_only() -> None:
    harness = make_harness(
        cache="user_aware", pages=128, policy=WritePolicy.WRITE_BACK, snapshots=40, host_snapshots=40
    )
    serve(harness, "alice's", PROMPT[:50], max_tokens=1)
    serve(harness, "bob's", PROMPT[:60], max_tokens=1, user="bob")
    harness.cache.advance(1)
    assert harness.cache.usage.merged_pages == 12
    assert harness.cache.host is not None
    assert harness.cache.snapshots is not None
    on_device = Counter(entry.owner.scope for entry in harness.cache.snapshots.all())
    harness.cache.host.back_up_all()
    harness.run()
    assert len(on_device) == 2
    assert Counter(entry.owner.scope for entry in host_states(harness).host.all()) == on_device
    leave_device(harness)
    assert serve(harness, "alice's second", PROMPT[:60], max_tokens=1) == 48
    assert serve(harness, "bob's second", PROMPT[:60], max_tokens=1, user="bob") == 56


def test_snapshots_remain_with_their_pages_if_a_node_is_split_while_they_are_copied() -> None:
    harness = make_harness(pages=64, snapshots=40, host_snapshots=40)
    harness.core.submit(make_request("first", PROMPT[:50], max_tokens=1), 0.0)
    while not harness.worker.open:
        harness.plan()
        harness.result()
    (backup,) = [opened.transfer for opened in harness.worker.open.values()]
    assert len(backup.device_snapshots) == 3
    # It continues after four pages, where the node that is copied is cut.
    harness.core.submit(make_request("diverges", [*PROMPT[:18], *FLOOD[:9]], max_tokens=1), 0.0)
    for _ in range(9):
        harness.plan()
        harness.result()
        harness.audit()
    assert harness.cached["diverges", 0] == 16
    assert backup.transfer_id in harness.worker.open, "it is still being copied"
    harness.run()
    for length in (50, 34, 18):
        leave_device(harness)
        assert serve(harness, f"of {length}", PROMPT[:length], max_tokens=1) == length - 2


def test_a_snapshot_that_is_loaded_for_a_node_that_goes_meanwhile_is_dropped() -> None:
    harness = make_harness(cache="user_aware")

    def ask(name: str) -> None:
        request = with_options(make_request(name, PROMPT[:50], max_tokens=1), session="session")
        assert harness.core.submit(request, 0.0).rejected is None

    ask("cold")
    harness.run()
    lose_snapshots(harness, on_host=False)
    ask("waits")
    harness.plan()
    (load,) = [opened.transfer for opened in harness.worker.open.values()]
    assert (load.pages, len(load.device_snapshots)) == (0, 1)
    assert harness.cache.snapshots is not None
    assert harness.cache.snapshots.moving == 1
    harness.cache.forget(Subject("tenant", "alice"), "session")
    assert host_states(harness).host.kept == 0
    harness.audit()
    harness.complete_all()
    assert harness.cache.snapshots.kept == harness.cache.snapshots.moving == host_states(harness).host.moving == 0
    harness.run()
    harness.audit()
    assert harness.cached["waits", 0] == 0
    assert harness.outputs["waits", 0] == expected_output(PROMPT[:50], 51, (STOP_ID,))


def test_what_is_loaded_for_a_request_that_is_aborted_serves_the_next() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    harness.core.submit(make_request("gone", PROMPT[:50]), 0.0)
    harness.plan()
    assert harness.core.memory.loads is not None
    # 12 pages, and a snapshot as large as four.
    assert harness.core.memory.loads.loading_tokens == 64
    harness.core.abort(RequestId("gone"))
    harness.run()
    assert harness.core.memory.loads.loading_tokens == 0
    assert serve(harness, "next", PROMPT[:50]) == 48
    assert len(transfers(harness, LOAD)) == 1


def test_two_requests_for_one_prefix_share_one_load() -> None:
    harness = make_harness(pages=48)
    serve(harness, "cold", PROMPT[:49])
    leave_device(harness)
    for name, tail in (("one", 1), ("two", 2)):
        harness.core.submit(make_request(name, [*PROMPT[:49], tail]), 0.0)
    harness.run()
    assert harness.cached["one", 0] == harness.cached["two", 0] == 48
    assert transfers(harness, LOAD) == [(12, 1)]
    # Likewise of a snapshot alone.
    lose_snapshots(harness, on_host=False)
    for name, tail in (("three", 3), ("four", 4)):
        harness.core.submit(make_request(name, [*PROMPT[:49], tail]), 0.0)
    harness.run()
    assert harness.cached["three", 0] == harness.cached["four", 0] == 48
    assert transfers(harness, LOAD)[1:] == [(0, 1)]


def test_a_rank_that_is_late_keeps_the_row_waiting() -> None:
    harness = make_harness(ranks=2)
    serve(harness, "cold", PROMPT[:50])
    lose_snapshots(harness, on_host=False)
    harness.core.submit(make_request("waits", PROMPT[:50]), 0.0)
    harness.plan()
    (load,) = harness.worker.open
    harness.complete(load, 1)
    for _ in range(3):
        harness.plan()
        harness.result()
    assert ("waits", 0) not in harness.cached
    harness.complete(load, 0)
    harness.run()
    assert harness.cached["waits", 0] == 48


def test_dead_workers_lose_the_snapshots_of_both_tiers() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    harness.core.submit(make_request("unlucky", PROMPT[:50], max_tokens=4), 0.0)
    harness.plan()
    assert harness.worker.open
    harness.lose_workers()
    harness.audit()
    assert host_states(harness).host.kept == host_states(harness).host.moving == 0
    harness.run()
    assert harness.cached["unlucky", 0] == 0
    assert harness.outputs["unlucky", 0] == expected_output(PROMPT[:50], 54, (STOP_ID,))


def test_loading_is_skipped_where_computing_is_faster_than_copying_the_snapshot() -> None:
    # Copying a token takes 0.6 of the time that computing it does.
    harness = make_harness(prefill_tokens_per_s=1e3, load_bytes_per_s=1e3 / 0.6, snapshots=40, host_snapshots=40)
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    # 16 tokens and a snapshot, which is as large as 16: 19 ms and a latency of 5 ms, against 16.
    assert serve(harness, "short", [*PROMPT[:16], *FLOOD[:9]]) == 0
    assert not transfers(harness, LOAD)
    assert harness.core.memory.loads is not None
    assert harness.core.memory.loads.skipped_tokens == 16
    leave_device(harness)
    # 48 tokens and a snapshot: 43 ms against 48.
    assert serve(harness, "long", PROMPT[:50]) == 48


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize(("host_pages", "host_snapshots"), [(1, 1), (3, 2), (7, 3), (40, 0), (40, 4)])
@pytest.mark.parametrize(("pages", "snapshots"), [(9, 2), (12, 5)])
def test_the_smallest_pools_serve(
    policy: WritePolicy, host_pages: int, host_snapshots: int, pages: int, snapshots: int
) -> None:
    harness = make_harness(
        pages=pages, snapshots=snapshots, interval=2, host_pages=host_pages, host_snapshots=host_snapshots,
        policy=policy, max_context=32,
    )  # fmt: skip
    for number in range(8):
        serve(harness, f"r{number}", PROMPT[: 12 + 4 * (number % 3)], user=f"user{number % 2}")


def test_selective_write_through_copies_snapshots_of_reused_pages_only() -> None:
    harness = make_harness(pages=64, policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    serve(harness, "first", PROMPT[:50])
    assert host_states(harness).host.kept == 0
    serve(harness, "second", PROMPT[:50])
    assert host_states(harness).host.kept > 0
    leave_device(harness)
    assert serve(harness, "third", PROMPT[:50]) == 48


def test_write_back_copies_snapshots_with_pages_that_are_about_to_go() -> None:
    harness = make_harness(pages=64, policy=WritePolicy.WRITE_BACK, host_pages=200, host_snapshots=60, snapshots=60)
    serve(harness, "one", PROMPT[:50])
    assert host_states(harness).host.kept == 0
    for number in range(4):
        serve(harness, f"other {number}", [number + 1, *FLOOD[:80]])
    assert host_states(harness).host.kept > 0
    assert serve(harness, "again", PROMPT[:50]) == 48
    assert any(count for _, count in transfers(harness, LOAD))


def test_before_sleep_all_snapshots_are_copied_whatever_the_policy() -> None:
    harness = make_harness(pages=64, policy=WritePolicy.WRITE_BACK, snapshots=20, host_snapshots=40)
    serve(harness, "one", PROMPT[:50])
    serve(harness, "two", FLOOD[:40], user="bob")
    assert harness.cache.host is not None
    assert harness.cache.snapshots is not None
    on_device = harness.cache.snapshots.kept
    harness.cache.host.back_up_all()
    harness.run()
    harness.audit()
    assert host_states(harness).host.kept == on_device
    harness.core.memory.leave_device()
    assert serve(harness, "again", PROMPT[:50]) == 48


def test_a_busy_device_lets_a_request_compute_instead_of_waiting_for_a_slot() -> None:
    harness = make_harness(snapshots=4)
    serve(harness, "cold", PROMPT[:50])
    leave_device(harness)
    assert harness.cache.snapshots is not None
    busy = [harness.cache.snapshots.try_reserve() for _ in range(2)]
    assert None not in busy
    assert harness.cache.snapshots.try_reserve() is None, "copies fill half of the slots at most"
    harness.core.submit(make_request("computes", PROMPT[:50]), 0.0)
    harness.plan()
    assert harness.cached["computes", 0] == 0
    for slot in busy:
        assert slot is not None
        harness.cache.snapshots.cancel(slot)
    harness.run()


def test_a_user_over_its_quota_evicts_its_own_copies_first() -> None:
    harness = make_harness(
        cache="user_aware",
        pages=64,
        snapshots=40,
        host_pages=400,
        host_snapshots=20,
        rules=CacheConfig(quota_share=0.5),
    )
    serve(harness, "bob", FLOOD[:40], user="bob")
    bobs = [entry for entry in host_states(harness).host.all() if entry.owner.scope[1] == "bob"]
    assert bobs
    for number in range(12):
        serve(harness, f"alice {number}", [number + 1, *PROMPT[:40]])
    states = host_states(harness)
    assert states.host.kept == 20, "it is full"
    assert [entry for entry in states.host.all() if entry.owner.scope[1] == "bob"] == bobs
    assert serve(harness, "bob again", FLOOD[:40], user="bob") == 36
