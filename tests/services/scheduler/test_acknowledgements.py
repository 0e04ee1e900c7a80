from __future__ import annotations

from common.transfers import TransferAck, TransferId
from services.scheduler.acknowledgements import GroupAcks


def ack(number: int, pages: int = 8, duration_us: int = 5) -> TransferAck:
    return TransferAck(TransferId(number), pages, duration_us)


def test_one_rank_speaks_for_itself() -> None:
    assert GroupAcks(1).add(0, ack(3)) == ack(3)


def test_a_transfer_is_done_when_the_last_rank_says_so_in_whatever_order() -> None:
    acks = GroupAcks(3)
    assert acks.add(2, ack(1)) is None
    assert acks.add(0, ack(2)) is None
    assert acks.add(1, ack(2)) is None
    assert acks.add(0, ack(1)) is None
    assert acks.add(2, ack(2)) == ack(2)
    assert acks.add(1, ack(1)) == ack(1)


def test_the_group_has_what_all_ranks_have_and_is_as_slow_as_the_slowest() -> None:
    acks = GroupAcks(2)
    acks.add(0, ack(1, pages=5, duration_us=70))
    assert acks.add(1, ack(1, pages=8, duration_us=20)) == ack(1, pages=5, duration_us=70)


def test_a_rank_that_says_it_twice_does_not_stand_for_another() -> None:
    acks = GroupAcks(2)
    assert acks.add(0, ack(1)) is None
    assert acks.add(0, ack(1)) is None
    assert acks.add(1, ack(1)) == ack(1)
