from __future__ import annotations

import random

import pytest

from deploy.evaluation.attack.findings import Group, pairs_for, pooled, within


def pairs(count: int, shift: float, seed: int = 0) -> list[Group]:
    chance = random.Random(seed)
    return [Group((chance.gauss(shift, 1),), (chance.gauss(0, 1),)) for _ in range(count)]


def test_blind_observations_have_an_area_of_a_half_within_the_interval() -> None:
    separation = pooled(pairs(250, 0.0))
    assert separation.low < 0.5 < separation.high
    assert separation.auc == pytest.approx(0.5, abs=0.06)
    assert separation.half_width == pytest.approx(0.05, abs=0.01)
    assert separation.ks > 0.01


def test_the_area_is_the_probability_that_a_held_text_scores_higher() -> None:
    # Two normal distributions one deviation apart: Φ(1 / √2) = 0.760.
    separation = pooled(pairs(1000, 1.0))
    assert separation.auc == pytest.approx(0.760, abs=0.03)
    assert separation.low < 0.760 < separation.high
    assert separation.ks < 1e-9


def test_a_perfect_oracle_is_one_and_a_reversed_one_folds_to_it() -> None:
    groups = [Group((-1.0,), (1.0,)) for _ in range(10)]
    assert pooled(groups).auc == 0
    folded = pooled(groups).folded
    assert (folded.auc, folded.low, folded.high) == (1, 1, 1)


def test_equal_observations_leave_nothing_to_chance() -> None:
    # Texts of two kinds differ from each other, but no held text from its control.
    separation = pooled([Group((32.0,), (32.0,)), Group((0.0,), (0.0,))] * 3)
    assert (separation.auc, separation.half_width) == (0.5, 0)


def test_places_in_a_queue_are_compared_within_the_queue_only() -> None:
    early, late = Group((5.0, 6.0), (5.5, 5.6)), Group((105.0, 106.0), (105.5, 105.6))
    assert within([early, late]).auc == 0.5
    ahead = Group((9.0, 8.0), (1.0, 2.0)), Group((109.0, 108.0), (101.0, 102.0))
    assert within(ahead).auc == 1


def test_two_equal_groups_leave_a_wide_interval() -> None:
    alike = Group((1.0, 4.0), (2.0, 3.0))
    separation = within([alike, alike])
    assert separation.low == separation.high == 0.5
    assert separation.half_width > 0.3


def test_how_many_pairs_an_interval_takes() -> None:
    assert pairs_for(0.05) == pytest.approx(256, abs=2)
    assert pairs_for(0.1) == pytest.approx(64, abs=1)
