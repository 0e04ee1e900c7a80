"""Which group a request goes to: affinity where it helps, no group overrun, nothing learnt across users."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.images import image_ids
from common.types import (
    EXPECTED_OUTPUT_TOKENS,
    Pooling,
    RequestOptions,
    Resume,
    SessionTurn,
    StopConditions,
    Subject,
    View,
)
from services.tokenizer.routing.policies import (
    FREE_LOAD,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    RoutingCandidate,
    affinity_key,
    expected_tokens,
    favourite,
    make_policy,
    session_key,
    with_room,
)
from tests.services.tokenizer.routing.requests import schedule

if TYPE_CHECKING:
    from common.types import ScheduleRequest

NAMES = ("a:1", "b:1", "c:1", "d:1")
keys = st.binary(min_size=32, max_size=32)
loads = st.lists(st.integers(0, 200), min_size=1, max_size=8)


def candidates(*numbers: int) -> list[RoutingCandidate]:
    return [RoutingCandidate(f"group-{index}", load) for index, load in enumerate(numbers)]


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    chosen = [policy.choose(b"", candidates(9, 0, 5)) for _ in range(6)]
    assert chosen == ["group-0", "group-1", "group-2"] * 2


@given(keys, loads)
def test_the_least_loaded_has_no_more_than_any_other(key: bytes, numbers: list[int]) -> None:
    chosen = LeastLoaded().choose(key, candidates(*numbers))
    assert numbers[int(chosen.removeprefix("group-"))] == min(numbers)


@given(keys, loads, st.floats(1.01, 4))
def test_no_group_gets_more_than_its_bounded_share(key: bytes, numbers: list[int], factor: float) -> None:
    chosen = int(PrefixAware(factor).choose(key, candidates(*numbers)).removeprefix("group-"))
    share = (sum(numbers) + 1) / len(numbers)
    assert numbers[chosen] < max(FREE_LOAD, factor * share + 1)


@given(st.lists(keys, min_size=1, max_size=50, unique=True), st.sampled_from(NAMES))
def test_a_group_that_leaves_takes_only_its_own_keys_along(asked: list[bytes], leaving: str) -> None:
    policy = PrefixAware(1.25)
    before = {key: policy.choose(key, [RoutingCandidate(name, 0) for name in NAMES]) for key in asked}
    after = {key: policy.choose(key, [RoutingCandidate(name, 0) for name in NAMES if name != leaving]) for key in asked}
    assert all(after[key] == before[key] for key in asked if before[key] != leaving)


def test_keys_spread_over_all_groups_evenly() -> None:
    policy = PrefixAware(1.25)
    idle = [RoutingCandidate(name, 0) for name in NAMES]
    counts = Counter(policy.choose(index.to_bytes(32, "big"), idle) for index in range(4000))
    assert all(850 < counts[name] < 1150 for name in NAMES)


def test_an_overloaded_preferred_group_is_avoided() -> None:
    policy = PrefixAware(1.25)
    favourite = policy.choose(bytes(32), candidates(0, 0, 0))
    crowded = [RoutingCandidate(c.name, 90 if c.name == favourite else 5) for c in candidates(0, 0, 0)]
    assert policy.choose(bytes(32), crowded) != favourite


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (schedule("2", user="ann", ids=[*range(64), 7]), True),  # differs behind the first pages
        (schedule("2", user="ann", ids=[9, *range(64)]), False),
        (schedule("2", user="bob", ids=[*range(65)]), False),
        (schedule("2", tenant="rival", user="ann", ids=[*range(65)]), False),
    ],
)
def test_an_affinity_key_belongs_to_one_user_s_prompts_with_equal_beginnings(
    other: ScheduleRequest, *, same: bool
) -> None:
    mine = affinity_key(schedule("1", user="ann", ids=[*range(65)]))
    assert (affinity_key(other) == mine) is same


def test_affinity_keys_depend_on_the_picture_at_the_beginning() -> None:
    def key(picture: bytes, user: str, rest: int) -> bytes:
        digest = hashlib.sha256(picture).digest()
        return affinity_key(schedule("1", user=user, ids=[1, 2, *image_ids(digest, 100).tolist(), rest]))

    mine = key(b"cat", "ann", 5)
    assert key(b"cat", "ann", 6) == mine
    assert len({mine, key(b"dog", "ann", 5), key(b"cat", "bob", 5)}) == 3


def test_affinity_keys_separate_tenant_and_user() -> None:
    first, second = schedule("1", tenant="ab", user="c"), schedule("1", tenant="a", user="bc")
    assert affinity_key(first) != affinity_key(second)


def test_ids_of_any_integer_type_have_one_key() -> None:
    request = schedule("1", ids=[1, 2, 70_000])
    wide = replace(request, token_ids=np.array([1, 2, 70_000], dtype=np.int64))
    assert affinity_key(request) == affinity_key(wide)


def test_every_policy_of_the_settings_is_there() -> None:
    kinds = [type(make_policy(name, 1.25)) for name in ("round_robin", "least_loaded", "prefix_aware")]
    assert kinds == [RoundRobin, LeastLoaded, PrefixAware]


def test_sessions_of_one_name_are_apart_for_different_users_and_move_only_with_their_group() -> None:
    names = ["a", "b", "c"]
    keys = {session_key(View(Subject("acme", user)), session) for user in ("ann", "bob") for session in ("s", "t")}
    assert len(keys) == 4
    many = [session_key(View(Subject("acme", f"user-{number}")), "chat") for number in range(200)]
    homes = {key: favourite(key, names) for key in many}
    assert set(homes.values()) == set(names)
    assert all(homes[key] == favourite(key, ["a", "b"]) for key in many if homes[key] != "c")


rooms = st.lists(st.none() | st.integers(-50, 200), min_size=1, max_size=8)


@given(rooms, st.integers(1, 150))
def test_only_groups_with_room_are_offered_while_there_are_any(free: list[int | None], tokens: int) -> None:
    groups = [RoutingCandidate(f"group-{index}", 0, each) for index, each in enumerate(free)]
    offered = with_room(groups, tokens)
    roomy = [each for each in groups if each.free_tokens is None or each.free_tokens >= tokens]
    assert list(offered) == (roomy or groups)


@given(st.lists(keys, min_size=20, max_size=20, unique=True))
def test_prompts_leave_a_full_group_and_no_other(asked: list[bytes]) -> None:
    policy = PrefixAware(1.25)
    empty = [RoutingCandidate(name, 0, 1000) for name in NAMES]
    full = [RoutingCandidate(each.name, 0, 99 if each.name == NAMES[0] else 1000) for each in empty]
    for key in asked:
        home = policy.choose(key, with_room(empty, 100))
        now = policy.choose(key, with_room(full, 100))
        assert now != NAMES[0]
        assert home in (now, NAMES[0])


def test_a_request_takes_room_in_what_is_known_of_its_group() -> None:
    assert RoutingCandidate("a", 3, 100).after(40) == RoutingCandidate("a", 4, 60)
    assert RoutingCandidate("a", 3).after(40) == RoutingCandidate("a", 4)


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (RequestOptions(), EXPECTED_OUTPUT_TOKENS),
        (RequestOptions(stop=StopConditions(max_tokens=10)), 10),
        (RequestOptions(stop=StopConditions(max_tokens=10_000)), EXPECTED_OUTPUT_TOKENS),
        (RequestOptions(stop=StopConditions(max_tokens=10), n=3), 30),
        # Four of the ten are there.
        (RequestOptions(stop=StopConditions(max_tokens=10), resume=Resume((1, 2, 3, 4), 9)), 10),
        (RequestOptions(resume=Resume((1, 2, 3, 4), 9)), EXPECTED_OUTPUT_TOKENS + 4),
        (RequestOptions(pooling=Pooling.LAST), 0),
        # The conversation that the turn continues, and no more than one token is generated.
        (RequestOptions(turn=SessionTurn("one", conversation_ids=(5,) * 7), stop=StopConditions(max_tokens=0)), 8),
    ],
)
def test_a_request_is_expected_to_need_its_prompt_and_a_usual_output(options: RequestOptions, output: int) -> None:
    assert expected_tokens(replace(schedule("1", ids=[1, 2, 3]), options=options)) == 3 + output
