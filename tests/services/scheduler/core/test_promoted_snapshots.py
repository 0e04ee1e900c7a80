"""Texts of models with recurrent layers that become shared: each user who computed one keeps its own snapshots.

A stranger finds the text, but none of their snapshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.scheduler.cache.accounts import Accounts
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.state_snapshots import StateSnapshots
from services.scheduler.cache.tiers.config import HostConfig
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.cache.driver import int32
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from services.scheduler.cache.types import Scope

PROMPT = [(17 * position) % 900 + 10 for position in range(50)]
# As many as have to compute a text before it is shared.
USERS = ("alice", "bob", "carol")
# Of the prompt's whole pages.
FOUND = 48


def make_harness(*, has_host: bool = True, quota_share: float = 0.25) -> Harness:
    """Pages of 4 tokens, a snapshot every 4 pages, and room for everything."""
    host = HostConfig(pages=128, snapshots=60) if has_host else None
    rules = CacheConfig(quota_share=quota_share)
    return Harness(
        cache="user_aware", pages=128, snapshots=60, interval=4, host=host, max_context=120, rules=rules
    )  # fmt: skip


def serve(harness: Harness, user: str, prompt: list[int] = PROMPT) -> int:
    """Serve a prompt to its end; return the number of its cached tokens."""
    name = f"{user} {len(harness.finishes)}"
    harness.core.submit(make_request(name, prompt, max_tokens=1, user=user), 0.0)
    harness.run()
    harness.audit()
    assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + 1, (STOP_ID,))
    return harness.cached[name, 0]


def share(harness: Harness) -> None:
    """Reach the boundary at which the prompt becomes shared."""
    assert shared_pages(harness) == 0
    harness.cache.share()
    harness.audit()
    assert shared_pages(harness) == FOUND // 4


def shared_pages(harness: Harness) -> int:
    """Count the pages of shared nodes, on any tier."""
    assert isinstance(harness.cache, RadixCache)
    return sum(node.size for node, _ in harness.cache.store.tree.walk() if node.is_shared)


def leave_device(harness: Harness) -> None:
    """Do as before the workers sleep."""
    assert harness.cache.host is not None
    harness.cache.host.back_up_all()
    harness.run()
    harness.core.memory.leave_device()
    harness.audit()


def check_all_continue(harness: Harness) -> None:
    assert [serve(harness, user) for user in USERS] == [FOUND] * 3
    # A row that computes shared pages would leave snapshots for all.
    assert serve(harness, "dora") == 0, "a stranger has the pages, but no snapshot"


@pytest.mark.parametrize("has_host", [False, True])
def test_users_of_a_text_that_becomes_shared_continue_on_the_device(has_host: bool) -> None:
    harness = make_harness(has_host=has_host)
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    share(harness)
    check_all_continue(harness)


def test_users_of_a_text_that_becomes_shared_while_the_model_sleeps_continue_after_it() -> None:
    harness = make_harness()
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    leave_device(harness)
    share(harness)
    check_all_continue(harness)


def test_users_of_a_text_that_is_shared_before_the_model_sleeps_continue_after_it() -> None:
    harness = make_harness()
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    share(harness)
    leave_device(harness)
    check_all_continue(harness)


@pytest.mark.parametrize("returning", USERS)
def test_users_whose_copies_are_on_different_tiers_continue(returning: str) -> None:
    harness = make_harness()
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    leave_device(harness)
    assert serve(harness, returning) == FOUND
    share(harness)
    check_all_continue(harness)


@pytest.mark.parametrize(("has_host", "sleeps"), [(False, False), (True, False), (True, True)])
def test_users_whose_equal_pages_were_merged_before_continue(has_host: bool, sleeps: bool) -> None:
    harness = make_harness(has_host=has_host)
    assert [serve(harness, user) for user in USERS[:2]] == [0, 0]
    harness.cache.share()
    assert harness.cache.usage.merged_pages == FOUND // 4
    assert serve(harness, USERS[2]) == 0
    if sleeps:
        leave_device(harness)
    share(harness)
    check_all_continue(harness)


def test_snapshots_that_are_being_copied_when_their_text_becomes_shared_arrive() -> None:
    harness = make_harness()
    for user in USERS:
        harness.core.submit(make_request(user, PROMPT, max_tokens=1, user=user), 0.0)
        while (user, 0) not in harness.finishes:
            harness.plan()
            harness.result()
    harness.plan()
    assert len(harness.worker.open) == 3
    share(harness)
    harness.run()
    harness.core.memory.leave_device()
    harness.audit()
    check_all_continue(harness)


def test_users_lose_the_snapshots_of_a_shared_text_when_they_are_forgotten() -> None:
    harness = make_harness()
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    leave_device(harness)
    share(harness)
    harness.cache.forget(make_request("any", PROMPT, user="bob").view.subject)
    # In this order: bob leaves snapshots for all.
    assert [serve(harness, user) for user in ("alice", "carol", "bob")] == [FOUND, FOUND, 0]


@pytest.mark.parametrize("has_host", [False, True])
def test_snapshots_of_a_shared_text_count_against_their_users_quotas(*, has_host: bool) -> None:
    """Also if nothing else of a user is in the cache when the text becomes shared."""
    quota = 6
    harness = make_harness(has_host=has_host, quota_share=quota / 60)
    assert [serve(harness, user) for user in USERS] == [0, 0, 0]
    share(harness)
    snapshots = harness.cache.snapshots
    assert snapshots is not None

    def kept(user: str) -> int:
        return sum(entry.owner.subject == ("tenant", user) for entry in snapshots.all())

    before = kept("alice")
    assert 1 < before < quota
    for first in range(4):
        serve(harness, "alice", [first, *PROMPT])
    assert kept("alice") == quota
    assert kept("bob") == before
    # An account is there as long as anything is in it.
    harness.cache.flush()
    harness.audit()
    assert isinstance(harness.cache, RadixCache)
    accounts = harness.cache.store.accounts
    assert (len(accounts), accounts.tenants()) == (0, [])


def test_only_snapshots_of_the_scope_and_its_views_move_to_other_pages() -> None:
    config = CacheConfig(snapshots=8, snapshot_interval=4)
    pool = StateSnapshots(config, Accounts(config), pages=8)
    alice, bob, other = ("a", "alice", ""), ("a", "bob", ""), ("b", "alice", "")

    def attach(page: int, *scopes: Scope) -> None:
        for scope in scopes:
            slot = pool.try_allocate()
            assert slot is not None
            pool.attach(page, scope, slot)

    def owners(page: int) -> set[Scope]:
        return {entry.owner.scope for _, entry in pool.on(int32([page]))}

    attach(1, alice, bob, other)
    attach(2, alice)
    pool.pass_on(int32([1]), int32([2]), bob)
    assert (owners(1), owners(2)) == ({alice, other}, {alice, bob})
    # Alice has one there already.
    pool.pass_on(int32([1]), int32([2]), ("a",))
    assert (owners(1), owners(2)) == ({other}, {alice, bob})
    # The same page takes nothing from itself.
    pool.pass_on(int32([2, 1]), int32([2, 3]), ())
    assert (owners(1), owners(2), owners(3)) == (set(), {alice, bob}, {other})
    assert pool.faults() == []
    assert pool.kept == 3
