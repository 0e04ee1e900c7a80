from __future__ import annotations

import pytest

from common.types import Subject, View
from services.scheduler.cache.config import EXACT_SUBJECTS
from services.scheduler.cache.node import Account, Node
from services.scheduler.cache.sharing.counters import DistinctCount
from services.scheduler.cache.types import NodeId
from tests.services.scheduler.cache.driver import int32


def node_with(hits: int, users: int, epoch: int) -> Node:
    node = Node(NodeId(1), None, Account(()), b"", int32([]), epoch=epoch)
    node.hit_cur, node.u_cnt_l = hits, DistinctCount()
    for number in range(users):
        node.u_cnt_l.add(fingerprint(number))
    return node


def fingerprint(number: int) -> int:
    return Account(("tenant", f"user {number}")).fingerprint


def test_few_members_are_counted_exactly_and_once() -> None:
    count = DistinctCount()
    for number in [*range(EXACT_SUBJECTS), *range(EXACT_SUBJECTS)]:
        count.add(fingerprint(number))
    assert count.count == EXACT_SUBJECTS
    assert set(count.members) == {fingerprint(number) for number in range(EXACT_SUBJECTS)}


@pytest.mark.parametrize("users", [65, 100, 300, 1_000, 30_000])
def test_large_counts_are_estimated_within_a_quarter(users: int) -> None:
    count = DistinctCount()
    for _ in range(2):
        for number in range(users):
            count.add(fingerprint(number))
    assert count.count == pytest.approx(users, rel=0.25)
    assert count.members == ()


def test_copies_count_on_by_themselves() -> None:
    for users in (3, 100):
        count = node_with(1000, users, 0).u_cnt_l
        assert count is not None
        other = count.copy()
        before = count.count
        for number in range(1000, 2000):
            other.add(fingerprint(number))
        assert count.count == before
        assert other.count > before


def test_epoch_later_by_one_makes_the_window_the_one_before() -> None:
    node = node_with(hits=10, users=4, epoch=6)
    node.roll_over(7)
    assert (node.hit_pre, node.u_pre, node.hit_cur, node.distinct_users, node.epoch) == (10, 4, 0, 0, 7)


def test_gap_of_several_epochs_forgets_the_window() -> None:
    node = node_with(hits=10, users=4, epoch=6)
    node.roll_over(8)
    assert (node.hit_pre, node.u_pre, node.hit_cur, node.distinct_users, node.epoch) == (0, 0, 0, 0, 8)


def test_same_epoch_keeps_the_window() -> None:
    node = node_with(hits=10, users=4, epoch=6)
    node.roll_over(6)
    assert (node.hit_cur, node.distinct_users) == (10, 4)


def test_estimate_never_exceeds_the_hits() -> None:
    node = node_with(hits=70, users=70, epoch=0)
    assert node.distinct_users <= 70


def test_fingerprints_distinguish_subjects_by_both_parts() -> None:
    views = [
        View(Subject("a/b", "c")),
        View(Subject("a", "b/c")),
        View(Subject("ab", "c")),
        View(Subject("a", "bc")),
    ]
    assert len({Account((p.tenant, p.subject.name, p.salt)).fingerprint for p in views}) == 4
    # The same in every process: otherwise a replayed log gives another tree.
    assert Account(("tenant", "ann", "")).fingerprint == Account(("tenant", "ann", "salt")).fingerprint
    assert Account(("tenant", "ann", "")).fingerprint == 13900921519821955502
    assert Account(("\ud800", "\x00", "")).fingerprint != Account(("", "", "")).fingerprint
