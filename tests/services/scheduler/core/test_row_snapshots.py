"""Models with recurrent layers: rows continue from snapshots of other rows' states, and from nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from common.steps import EngineCapacity, RecurrentStates
from common.types import SessionWish
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.factory import can_reuse, with_snapshots
from services.scheduler.core.session import SessionRules
from tests.examples import examples
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options
from tests.services.scheduler.core.test_core_properties import CoreMachine

SESSIONS = SessionRules(per_subject=2, total=3, subject_tokens=80, tenant_tokens=80, total_tokens=80, timeout_s=1000.0)
PROMPT = [(17 * position) % 900 + 10 for position in range(80)]
OTHER = [(29 * position) % 900 + 11 for position in range(80)]


def states(**options: object) -> Harness:
    """Pages of 4 tokens, and a snapshot every 4 pages."""
    fields: dict[str, object] = {"pages": 80, "max_context": 120, "snapshots": 16, "interval": 4, **options}
    return Harness(**fields)  # type: ignore[arg-type]  # whatever a test wants to change


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 8, user: str = "alice") -> int:
    """Return how many tokens were cached."""
    harness.core.submit(make_request(name, prompt, max_tokens=max_tokens, user=user), 0.0)
    harness.run()
    harness.audit()
    assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
    return harness.cached[name, 0]


def kept(harness: Harness) -> int:
    assert harness.core.memory.states is not None
    assert harness.core.memory.states.pool.held == 0, "no row runs"
    return harness.core.memory.states.pool.kept


def drop_pages(harness: Harness) -> None:
    harness.core.memory.cache.flush()
    assert kept(harness) == 0


@pytest.mark.parametrize("target_plan_s", [0.0, 0.004])
@pytest.mark.parametrize("cache", ["shared", "isolated", "user_aware"])
def test_the_next_turn_continues_after_the_last_one(cache: str, target_plan_s: float) -> None:
    harness = states(cache=cache, target_plan_s=target_plan_s)
    assert serve(harness, "first", PROMPT[:21], max_tokens=20) == 0
    turn = [*PROMPT[:21], *harness.outputs["first", 0]]
    # Of 41 tokens, 40 are computed; plans in flight delay a save by a page or two.
    assert 28 <= serve(harness, "second", [*turn, 5, 6, 7]) <= 40
    # The same prompt again: up to its own last whole page.
    assert serve(harness, "again", PROMPT[:21]) == 20


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 6, 12])
def test_the_next_turn_continues_where_a_prompt_filled_its_last_page(max_tokens: int) -> None:
    harness = states(interval=100)
    serve(harness, "first", PROMPT[:24], max_tokens)
    # Before the prompt's last page, for equal prompts, and after its last page or a later one that the answer filled.
    assert kept(harness) == 2
    turn = [*PROMPT[:24], *harness.outputs["first", 0], *OTHER[:10]]
    assert serve(harness, "second", turn) == (24 + max_tokens - 1) // 4 * 4


def test_a_prompt_that_ends_within_a_page_leaves_one_snapshot() -> None:
    harness = states(interval=100)
    serve(harness, "first", PROMPT[:25], 1)
    assert kept(harness) == 1


def test_the_end_of_a_whole_page_within_a_shared_text_is_shown_to_its_user_only() -> None:
    harness = states(cache="user_aware", interval=100)
    for user in ("alice", "bob", "carol"):
        serve(harness, user, PROMPT[:36], max_tokens=1, user=user)
    harness.core.memory.cache.advance(1)
    serve(harness, "branch", PROMPT[:24], max_tokens=1, user="alice")
    assert serve(harness, "stranger's", [*PROMPT[:24], *OTHER[:9]], user="dora") == 0
    assert serve(harness, "own", [*PROMPT[:24], *OTHER[10:19]], user="alice") == 24


def test_every_fourth_page_has_a_snapshot() -> None:
    harness = states()
    serve(harness, "first", PROMPT[:50])
    assert serve(harness, "diverges", [*PROMPT[:39], *OTHER[:8]]) == 32
    # Where the two diverge, the second one has left a snapshot.
    assert serve(harness, "as well", [*PROMPT[:36], *OTHER[20:28]]) == 36


def test_nothing_is_cached_without_snapshots() -> None:
    harness = states(interval=100)
    serve(harness, "first", PROMPT[:50], max_tokens=1)
    assert kept(harness) == 1
    assert serve(harness, "shorter", PROMPT[:40]) == 0, "its pages are there, but no state"
    capacity = EngineCapacity(8, 16, 64, 100, (), 10, "", "cpu", 4, recurrent_states=RecurrentStates(0, 1000))
    assert not can_reuse(capacity)


def test_the_distance_of_snapshots_is_their_size_in_pages() -> None:
    capacity = EngineCapacity(8, 16, 64, 100, (), 10, "", "cpu", 4, recurrent_states=RecurrentStates(7, 1000))
    rules = with_snapshots(CacheConfig(), capacity)
    assert (rules.snapshots, rules.snapshot_interval) == (7, 7)
    assert can_reuse(capacity)


def test_private_snapshots_are_invisible_to_others_with_the_same_pages() -> None:
    harness = states(cache="user_aware", interval=100)
    serve(harness, "alice's", PROMPT[:50], max_tokens=1)
    assert serve(harness, "bob's", PROMPT[:60], max_tokens=1, user="bob") == 0
    harness.core.memory.cache.advance(1)
    assert harness.core.memory.cache.usage.merged_pages == 12, "the pages of both are merged"
    # Alice has a snapshot after 48 tokens, bob after 56, in the same pages.
    assert serve(harness, "bob's second", PROMPT[:52], max_tokens=1, user="bob") == 0
    assert serve(harness, "alice's second", PROMPT[:52], max_tokens=1) == 48
    # Now bob has left one there, too.
    assert serve(harness, "bob's third", PROMPT[:52], max_tokens=1, user="bob") == 48


@examples(25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["alice", "bob"]), st.sampled_from([16, 21, 25, 30, 38]), st.integers(0, 1)),
        min_size=4,
        max_size=10,
    ),
    st.sampled_from([3, 100]),
)
def test_what_a_user_finds_does_not_depend_on_anothers_snapshots(
    requests: list[tuple[str, int, int]], interval: int
) -> None:
    worlds = []
    for users in ({"alice", "bob"}, {"bob"}):
        rules = CacheConfig(quota_share=1.0)
        harness = states(cache="user_aware", pages=500, snapshots=200, interval=interval, rules=rules)
        found = []
        for number, (user, length, tail) in enumerate(requests):
            if user in users:
                prompt = [*PROMPT[:length], *OTHER[: 5 * tail]]
                cached = serve(harness, f"r{number}", prompt, max_tokens=1, user=user)
                found.append(cached if user == "bob" else None)
            # Equal pages of both are merged.
            harness.core.memory.cache.advance(number + 1)
        worlds.append([each for each in found if each is not None])
    assert worlds[0] == worlds[1]


def test_a_shared_prefix_has_snapshots_for_all_but_only_where_it_ends() -> None:
    harness = states(cache="user_aware", interval=100)
    cache = harness.core.memory.cache
    for user in ("alice", "bob", "carol"):
        # Of 36 shared tokens, and so evidence of three subjects.
        serve(harness, user, [*PROMPT[:36], *OTHER[:9]], user=user)
    cache.advance(1)
    # A private branch within the shared prefix leaves no snapshot that others would find.
    serve(harness, "branch", [*PROMPT[:22], *OTHER[40:60]], user="alice")
    assert serve(harness, "probe", [*PROMPT[:22], *OTHER[60:70]], user="dora") == 0
    assert serve(harness, "dora's", [*PROMPT[:36], *OTHER[:9], 3, 4, 5, 6], user="dora") == 0
    assert serve(harness, "emil's", [*PROMPT[:36], *OTHER[:9], 7, 8, 9], user="emil") == 44


def test_the_coldest_snapshots_go_when_slots_run_out() -> None:
    harness = states(snapshots=6, interval=100, pages=200, rules=CacheConfig(quota_share=1.0))
    for number in range(12):
        serve(harness, f"r{number}", [number + 10, *PROMPT[:30]], max_tokens=1)
        assert serve(harness, f"hot{number}", [10, *PROMPT[:30]], max_tokens=1) == 28
    assert kept(harness) == 6
    assert serve(harness, "cold", [12, *PROMPT[:30]], max_tokens=1) == 0
    assert serve(harness, "warm", [21, *PROMPT[:30]], max_tokens=1) == 28


def test_a_user_over_its_quota_evicts_its_own_snapshots() -> None:
    harness = states(snapshots=8, interval=100, pages=200, rules=CacheConfig(quota_share=0.25))
    serve(harness, "bob's", PROMPT[:30], max_tokens=1, user="bob")
    for number in range(12):
        serve(harness, f"a{number}", [number + 10, *OTHER[:30]], max_tokens=1, user="alice")
    assert kept(harness) == 3, "a quarter of eight, and bob's"
    assert serve(harness, "bob's second", PROMPT[:30], user="bob") == 28


def test_snapshots_go_with_their_pages() -> None:
    harness = states()
    serve(harness, "first", PROMPT[:50])
    assert kept(harness) > 1
    drop_pages(harness)
    assert serve(harness, "second", PROMPT[:50]) == 0


def test_forgetting_a_subject_drops_its_snapshots() -> None:
    harness = states(cache="user_aware")
    serve(harness, "first", PROMPT[:50])
    harness.core.memory.cache.forget(make_request("x", [1]).view.subject)
    assert kept(harness) == 0


def test_after_a_restart_of_the_workers_nothing_is_loaded_from_what_was_lost() -> None:
    harness = states()
    serve(harness, "first", PROMPT[:50])
    harness.core.submit(make_request("second", [*PROMPT[:50], 5], max_tokens=8), 0.0)
    harness.plan()
    harness.lose_workers()
    assert kept(harness) == 0
    harness.run()
    assert harness.outputs["second", 0] == expected_output([*PROMPT[:50], 5], 59, (STOP_ID,))
    assert serve(harness, "third", [*PROMPT[:50], 6]) == 48


def test_a_retracted_row_resumes_from_its_own_snapshot() -> None:
    harness = states(pages=22, max_rows=2, interval=4)
    for name, prompt in (("one", PROMPT[:24]), ("two", OTHER[:24])):
        harness.core.submit(make_request(name, prompt, max_tokens=30), 0.0)
    harness.run()
    harness.audit()
    assert harness.core.memory.retractions > 0
    for name, prompt in (("one", PROMPT[:24]), ("two", OTHER[:24])):
        assert harness.outputs[name, 0] == expected_output(prompt, 54, (STOP_ID,))
    resumed = [opened for plan in harness.plans for opened in plan.opens if opened.snapshot is not None]
    assert resumed
    assert all(opened.computed_tokens >= 20 for opened in resumed)


def test_equal_prompts_wait_for_the_first_ones_snapshot() -> None:
    harness = states(max_rows=4)
    for number in range(3):
        harness.core.submit(make_request(f"r{number}", PROMPT[:50], max_tokens=4), 0.0)
    harness.run()
    assert sorted(harness.cached[f"r{number}", 0] for number in range(3)) == [0, 48, 48]


def test_the_snapshot_of_a_session_goes_last() -> None:
    rules = CacheConfig(quota_share=1.0)
    harness = states(snapshots=6, interval=100, pages=200, rules=rules, sessions=SESSIONS)
    request = make_request("first", PROMPT[:30], max_tokens=1)
    harness.core.sessions.open(SessionWish(request.view, "chat"))
    harness.core.submit(with_options(request, session="chat"), 0.0)
    harness.run()
    for number in range(12):
        serve(harness, f"r{number}", [number + 10, *OTHER[:30]], max_tokens=1)
    turn = make_request("second", [*PROMPT[:30], *harness.outputs["first", 0], 5], max_tokens=1)
    harness.core.submit(with_options(turn, session="chat"), 0.0)
    harness.run()
    assert harness.cached["second", 0] == 28
    harness.audit()


def test_slots_that_leaked_are_found_and_repaired() -> None:
    harness = states()
    serve(harness, "first", PROMPT[:50])
    pool = harness.core.memory.cache.snapshots
    assert pool is not None
    assert pool.try_allocate() is not None
    accounts = harness.core.memory.account_snapshots(harness.core.rows)
    assert accounts is not None
    assert not accounts.is_exact
    harness.core.memory.repair_snapshots()
    assert pool.faults() == []
    accounts = harness.core.memory.account_snapshots(harness.core.rows)
    assert accounts is not None
    assert accounts.is_exact
    assert accounts.free + accounts.evictable == accounts.capacity == 16


def test_rows_hold_at_most_half_of_the_slots() -> None:
    harness = states(snapshots=4, max_rows=4)
    pool = harness.core.memory.cache.snapshots
    assert pool is not None
    for number in range(4):
        harness.core.submit(make_request(f"r{number}", [number + 10, *PROMPT[:20]], max_tokens=30), 0.0)
    most = 0
    for _ in range(1000):
        harness.plan()
        most = max(most, pool.held)
        assert pool.faults() == []
        if not harness.result():
            break
    assert most == 2


class SnapshotMachine(CoreMachine):
    @initialize(
        pages=st.integers(14, 40),
        depth=st.integers(1, 3),
        lock=st.sampled_from([0.0, 0.004]),
        cache=st.sampled_from(["isolated", "shared", "user_aware"]),
        snapshots=st.integers(2, 12),
        interval=st.integers(1, 5),
    )
    def start(self, pages: int, depth: int, lock: float, cache: str, snapshots: int, interval: int) -> None:
        self.harness = Harness(
            pages=pages,
            depth=depth,
            target_plan_s=lock,
            max_rows=4,
            max_step_tokens=12,
            max_context=56,
            cache=cache,  # type: ignore[arg-type]  # drawn from its names
            snapshots=snapshots,
            interval=interval,
            sessions=SessionRules(
                per_subject=2, total=3, subject_tokens=32, tenant_tokens=40, total_tokens=40, timeout_s=10.0
            ),
        )

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "harness"):
            pool = self.harness.core.memory.cache.snapshots
            assert pool is not None
            assert pool.faults() == []


SnapshotMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestSnapshots = SnapshotMachine.TestCase
