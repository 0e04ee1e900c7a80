from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from common.types import Subject
from services.tokenizer.encoding_pool import MAX_ABSENT, FairQueue

ANN, BOB, RIVAL = Subject("acme", "user/ann"), Subject("acme", "user/bob"), Subject("rival", "key/r")
SUBJECTS = st.sampled_from([ANN, BOB, RIVAL, Subject("third", "key/t")])
COSTS = st.integers(1, 50)


def take(queue: FairQueue[tuple[Subject, int]]) -> tuple[Subject, int]:
    item = queue.take(lambda _: True)
    assert item is not None
    return item


@given(st.lists(st.tuples(SUBJECTS, COSTS), max_size=60))
def test_everything_is_taken_once_and_each_subject_s_items_in_order(items: list[tuple[Subject, int]]) -> None:
    queue: FairQueue[tuple[Subject, int, int]] = FairQueue()
    numbered = [(subject, cost, number) for number, (subject, cost) in enumerate(items)]
    for entry in numbered:
        queue.add(entry[0], entry, entry[1])
    taken = [item for _ in items if (item := queue.take(lambda _: True)) is not None]
    assert queue.take(lambda _: True) is None
    assert sorted(taken, key=lambda item: item[2]) == numbered
    for subject in {subject for subject, _ in items}:
        own = [number for whose, _, number in taken if whose == subject]
        assert own == sorted(own)


@given(st.lists(COSTS, min_size=30, max_size=30), st.lists(COSTS, min_size=30, max_size=30))
def test_while_two_tenants_wait_their_work_differs_by_an_item_of_each(mine: list[int], theirs: list[int]) -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for subject, costs in ((ANN, mine), (RIVAL, theirs)):
        for cost in costs:
            queue.add(subject, (subject, cost), cost)
    waiting, work = Counter({ANN: 30, RIVAL: 30}), Counter({ANN: 0, RIVAL: 0})
    while all(waiting.values()):
        subject, cost = take(queue)
        waiting[subject] -= 1
        work[subject] += cost
        assert abs(work[ANN] - work[RIVAL]) <= max(mine) + max(theirs)


def test_invented_names_together_get_one_tenant_s_share() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for number in range(1000):
        invented = Subject("rival", f"user/{number}")
        queue.add(invented, (invented, 10), 10)
    for _ in range(10):
        queue.add(ANN, (ANN, 10), 10)
    first = [take(queue)[0].tenant for _ in range(20)]
    assert first.count("acme") == 10


def test_an_arriving_tenant_is_served_within_two_turns_and_accumulates_no_credit() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for _ in range(50):
        queue.add(RIVAL, (RIVAL, 100), 100)
    for _ in range(20):
        take(queue)
    for _ in range(30):
        queue.add(ANN, (ANN, 100), 100)
    taken = [take(queue)[0] for _ in range(20)]
    assert ANN in taken[:2]
    assert taken.count(ANN) == taken.count(RIVAL) == 10


def test_leaving_and_rejoining_the_queue_gains_nothing() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for _ in range(40):
        queue.add(ANN, (ANN, 100), 100)
    taken: list[Subject] = []
    for _ in range(40):
        # It has at most one item, so it leaves with each that is taken.
        if not taken or taken[-1] == RIVAL:
            queue.add(RIVAL, (RIVAL, 100), 100)
        taken.append(take(queue)[0])
    assert abs(taken.count(ANN) - taken.count(RIVAL)) <= 2


def test_names_that_are_invented_all_the_time_do_not_hold_up_others_of_their_tenant() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for _ in range(2):
        queue.add(ANN, (ANN, 100), 100)
    taken: list[Subject] = []
    for number in range(300):
        invented = Subject("acme", f"user/{number}")
        queue.add(invented, (invented, 10), 10)
        taken.append(take(queue)[0])
    assert taken.count(ANN) == 2


def test_an_item_that_may_not_start_blocks_only_its_own_subject() -> None:
    queue: FairQueue[str] = FairQueue()
    for subject, items in ((ANN, ("long", "after it")), (BOB, ("short",))):
        for item in items:
            queue.add(subject, item, 1)
    assert queue.take(lambda item: item != "long") == "short"
    assert queue.take(lambda item: item != "long") is None
    assert [queue.take(lambda _: True) for _ in range(3)] == ["long", "after it", None]


def test_a_removed_item_is_not_taken() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(ANN, "a", 1)
    queue.add(ANN, "b", 1)
    assert queue.remove(ANN, "a")
    assert not queue.remove(ANN, "a")
    assert not queue.remove(RIVAL, "b")
    assert [queue.take(lambda _: True) for _ in range(2)] == ["b", None]


def test_transient_names_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add(RIVAL, -1, 1)
    queue.add(ANN, -2, 1)
    for number in range(5 * MAX_ABSENT):
        queue.add(Subject("acme", f"user/{number}"), number, 1)
        queue.take(lambda item: item >= 0)
    assert len(queue._subjects["acme"]._times) <= MAX_ABSENT + 3


def test_work_that_took_longer_than_its_cost_is_charged_to_its_subject_and_tenant() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for number in range(4):
        for subject in (ANN, BOB, RIVAL):
            queue.add(subject, (subject, number), 10)
    assert take(queue)[0] == ANN
    queue.charge(ANN, 50)
    after = [take(queue)[0] for _ in range(11)]
    # The tenant of both has had 60, and within it Ann.
    assert after[:4] == [RIVAL] * 4
    assert after[4:8] == [BOB] * 4
    assert after[8:] == [ANN] * 3


def test_a_charge_for_a_subject_that_is_forgotten_changes_nothing() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    queue.add(ANN, (ANN, 0), 10)
    take(queue)
    queue.charge(ANN, 1000)
    for subject in (ANN, RIVAL, ANN, RIVAL):
        queue.add(subject, (subject, 0), 10)
    assert [take(queue)[0] for _ in range(4)] == [ANN, RIVAL, ANN, RIVAL]


def test_those_who_come_after_a_charge_do_not_wait_for_it_nor_precede_the_charged_for_long() -> None:
    queue: FairQueue[tuple[Subject, int]] = FairQueue()
    for number in range(8):
        queue.add(ANN, (ANN, number), 10)
    take(queue)
    queue.charge(ANN, 1000)
    take(queue)
    for number in range(4):
        queue.add(RIVAL, (RIVAL, number), 10)
    first = [take(queue)[0] for _ in range(4)]
    assert first[0] == RIVAL
    assert first.count(ANN) >= 1
