from __future__ import annotations

from common.transfers import TransferAck, TransferId
from services.scheduler.acknowledgements import GroupAcks


def ack(number: int, pages: int = 8, duration_us: int = 5, snapshots: int = 0) -> TransferAck:
    return TransferAck(TransferId(number), pages, duration_us, snapshots)


def test_a_single_rank_acknowledges_for_the_group() -> None:
    assert GroupAcks(1).add(0, ack(3)) == ack(3)


def test_a_transfer_is_done_when_the_last_rank_acknowledges_it_in_any_order() -> None:
    acks = GroupAcks(3)
    assert acks.add(2, ack(1)) is None
    assert acks.add(0, ack(2)) is None
    assert acks.add(1, ack(2)) is None
    assert acks.add(0, ack(1)) is None
    assert acks.add(2, ack(2)) == ack(2)
    assert acks.add(1, ack(1)) == ack(1)


def test_a_group_acknowledges_the_fewest_pages_and_the_longest_duration() -> None:
    acks = GroupAcks(2)
    acks.add(0, ack(1, pages=5, duration_us=70))
    assert acks.add(1, ack(1, pages=8, duration_us=20)) == ack(1, pages=5, duration_us=70)


def test_a_group_acknowledges_the_fewest_snapshots() -> None:
    acks = GroupAcks(2)
    acks.add(0, ack(1, snapshots=1))
    assert acks.add(1, ack(1, snapshots=0)) == ack(1, snapshots=0)


def test_a_repeated_acknowledgement_does_not_count_for_another_rank() -> None:
    acks = GroupAcks(2)
    assert acks.add(0, ack(1)) is None
    assert acks.add(0, ack(1)) is None
    assert acks.add(1, ack(1)) == ack(1)
