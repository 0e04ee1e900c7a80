from __future__ import annotations

import pytest

from common.errors import QueueFullError
from common.room import SharedRoom
from common.types import Subject

ANN, BOB, RIVAL = Subject("acme", "user/ann"), Subject("acme", "user/bob"), Subject("rival", "key/r")


def fill(room: SharedRoom, subject: Subject) -> int:
    for taken in range(1_000):
        try:
            room.take(subject)
        except QueueFullError:
            return taken
    raise AssertionError("it is never full")


def test_one_subject_takes_at_most_60_percent_and_its_tenant_three_quarters() -> None:
    room = SharedRoom(100, "open", 1000)
    assert fill(room, ANN) == 60
    assert 60 + fill(room, BOB) <= 75


def test_a_flood_of_one_tenant_with_invented_names_leaves_room_for_others() -> None:
    room = SharedRoom(100, "open", 1000)
    for number in range(75):
        room.take(Subject("acme", f"user/{number}"))
    with pytest.raises(QueueFullError, match="organization"):
        room.take(Subject("acme", "user/75"))
    for _ in range(10):
        room.take(RIVAL)


def test_a_request_of_many_parts_takes_free_room_and_returns_all_of_it() -> None:
    room = SharedRoom(100, "open", 1000)
    room.take(ANN, 90)
    with pytest.raises(QueueFullError):
        room.take(RIVAL, 20)
    room.take(RIVAL, 10)
    room.give_back(ANN, 90)
    room.give_back(RIVAL, 10)
    assert fill(room, BOB) == 60


def test_who_needs_no_place_is_admitted_to_a_full_room() -> None:
    room = SharedRoom(10, "open", 1000)
    taken = {subject: fill(room, subject) for subject in (ANN, BOB, RIVAL)}
    for subject in taken:
        room.take(subject, 0)
        room.give_back(subject, 0)
    room.give_back(ANN, taken[ANN])
    room.take(ANN)
