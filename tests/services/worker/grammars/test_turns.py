from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.grammars import GrammarScope
from services.worker.grammars.turns import CompileBudget, Turns
from tests.services.worker.grammars.fakes import ANN, BOB, RIVAL, Clock

SCOPES = st.builds(GrammarScope, st.sampled_from("tuv"), st.sampled_from("abc"))


@given(st.lists(SCOPES, max_size=30))
def test_each_item_is_taken_once_and_a_subjects_items_in_order(scopes: list[GrammarScope]) -> None:
    turns: Turns[tuple[GrammarScope, int]] = Turns()
    for number, scope in enumerate(scopes):
        turns.add(scope, (scope, number))
    taken = [item for _ in range(len(turns)) if (item := turns.take()) is not None]
    assert sorted(number for _, number in taken) == list(range(len(scopes)))
    for scope in scopes:
        mine = [number for owner, number in taken if owner == scope]
        assert mine == sorted(mine)
    assert len(turns) == 0


@given(st.lists(SCOPES, min_size=1, max_size=40))
def test_no_tenant_gets_two_turns_while_another_waits(scopes: list[GrammarScope]) -> None:
    turns: Turns[GrammarScope] = Turns()
    left = Counter(scope.tenant for scope in scopes)
    for scope in scopes:
        turns.add(scope, scope)
    taken = [item for _ in scopes if (item := turns.take()) is not None]
    assert len(taken) == len(scopes)
    for lhs, rhs in pairwise(taken):
        left[lhs.tenant] -= 1
        assert lhs.tenant != rhs.tenant or all(not left[tenant] for tenant in left if tenant != lhs.tenant)


def test_a_removed_item_gets_no_turn_and_the_longest_queue_gives_way() -> None:
    turns: Turns[str] = Turns()
    for scope, item in ((ANN, "a"), (ANN, "b"), (BOB, "c"), (RIVAL, "r")):
        turns.add(scope, item)
    assert turns.remove(BOB, "c")
    assert not turns.remove(BOB, "c")
    assert turns.waiting("acme") == 2
    assert turns.last_of_longest() == "b"
    assert [turns.take(), turns.take()] == ["a", "r"]


def test_rejoining_after_each_turn_does_not_jump_the_queue() -> None:
    turns: Turns[str] = Turns()
    turns.add(RIVAL, "r0")
    assert turns.take() == "r0"
    turns.add(RIVAL, "r1")
    turns.add(ANN, "a")
    turns.add(BOB, "b")
    assert turns.take() == "a"
    assert turns.take() == "r1"
    turns.add(RIVAL, "r2")
    assert [turns.take(), turns.take()] == ["b", "r2"]


def test_subjects_can_be_passed_over() -> None:
    turns: Turns[str] = Turns()
    turns.add(ANN, "a")
    turns.add(RIVAL, "r")
    assert turns.take({("acme", "user/ann")}) == "r"
    assert turns.take({("acme", "user/ann")}) is None
    assert turns.take() == "a"


def test_seconds_come_back_at_the_budgets_rate() -> None:
    clock = Clock()
    budget = CompileBudget(6.0, clock)
    assert budget.wait_s(ANN) == 0
    budget.charge(ANN, 6.0)
    assert budget.wait_s(ANN) == 0
    budget.charge(ANN, 3.0)
    assert budget.wait_s(ANN) == pytest.approx(30.0)
    assert budget.wait_s(BOB) == 0
    clock.now += 20.0
    assert budget.wait_s(ANN) == pytest.approx(10.0)
    clock.now += 1000.0
    budget.charge(ANN, 6.0)
    assert budget.wait_s(ANN) == 0
