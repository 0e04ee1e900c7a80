from __future__ import annotations

import random
import re

import pytest

from deploy.evaluation.attack.findings import Finding, Group, OracleVerdict, judge, pooled
from deploy.evaluation.attack.oracles.evidence import SybilSweep, judge_sweep


def finding(pairs: int, shift: float, *, either_way: bool = False) -> Finding:
    chance = random.Random(7)
    groups = [Group((chance.gauss(shift, 1),), (chance.gauss(0, 1),)) for _ in range(pairs)]
    return judge("oracle", pooled(groups), either_way=either_way)


def test_a_clear_difference_leaks() -> None:
    assert finding(250, 1.0).verdict is OracleVerdict.LEAKS
    assert finding(250, 1.0).probes == 500


def test_no_difference_in_250_pairs_is_closed() -> None:
    assert finding(250, 0.0).verdict is OracleVerdict.CLOSED


def test_no_difference_in_a_few_pairs_is_undecided_and_says_how_many_it_takes() -> None:
    found = finding(20, 0.0)
    assert found.verdict is OracleVerdict.UNDECIDED
    needed = re.search(r"about (\d+) pairs would decide, these were 20", found.note)
    assert needed is not None
    assert 100 < int(needed[1]) < 500


def test_a_small_leak_that_few_pairs_suggest_is_undecided_not_closed() -> None:
    assert finding(20, 0.4).verdict is OracleVerdict.UNDECIDED


def test_a_two_sided_oracle_counts_later_service_as_a_leak() -> None:
    assert finding(250, -1.0).verdict is OracleVerdict.CLOSED
    assert finding(250, -1.0, either_way=True).verdict is OracleVerdict.LEAKS


@pytest.mark.parametrize(
    ("first_hits", "verdict"),
    [
        # k = 3, and k + 1 colluders: without holders the fourth hits what the first three have made public.
        ((4, 3, 2, 1), OracleVerdict.BOUNDED),
        ((None, None, None, None), OracleVerdict.CLOSED),
        ((2, 1, 1, 1), OracleVerdict.LEAKS),
        ((4, 2, 2, 1), OracleVerdict.LEAKS),
        # Less than the bound allows is within it.
        ((4, 3, 2, 2), OracleVerdict.BOUNDED),
    ],
)
def test_a_sweep_is_judged_by_the_bound(first_hits: tuple[int | None, ...], verdict: OracleVerdict) -> None:
    assert judge_sweep(SybilSweep(3, 4, first_hits)).verdict is verdict


def test_the_bound_is_met_exactly_where_n_plus_a_exceeds_k() -> None:
    sweep = SybilSweep(3, 4, (4, 3, 2, 1))
    assert sweep.leaking == sweep.expected
    assert (1, 2) not in sweep.leaking
    assert (2, 2) in sweep.leaking
    assert "exactly" in judge_sweep(sweep).note
