"""Which adapters get a slot, who makes room, and that nobody waits for ever."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from common.steps import AdapterLoad
from services.scheduler.core.adapter_slots import AdapterSlots


def start(slots: AdapterSlots, digest: str, tenant: str = "a") -> int | None:
    slots.begin_plan()
    return slots.take(digest, tenant) if slots.may_take(digest, tenant) else None


def test_rows_of_one_adapter_share_its_slot_which_is_loaded_once() -> None:
    slots = AdapterSlots(2)
    first = start(slots, "x")
    assert first == start(slots, "x")
    assert slots.take_loads() == (AdapterLoad(first, "x"),)  # type: ignore[arg-type]  # it has started
    assert slots.take_loads() == ()
    assert slots.rows_of("x") == 2
    assert slots.rows_of("y") is None


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    slots = AdapterSlots(2)
    for digest in ("x", "y", "x"):
        start(slots, digest)
    slots.give_back("x")
    slots.give_back("x")
    slots.give_back("y")
    start(slots, "z")
    assert slots.rows_of("y") is None
    assert slots.rows_of("x") == 0


def test_a_pinned_adapter_stays() -> None:
    slots = AdapterSlots(2)
    slots.pinned = {"x"}
    for digest in ("x", "y"):
        start(slots, digest)
        slots.give_back(digest)
    start(slots, "z")
    assert slots.rows_of("x") == 0
    assert slots.rows_of("y") is None


def test_a_pinned_adapter_displaces_none_once_it_has_a_slot() -> None:
    """So its use cannot be seen by what becomes of others' slots; that of an adapter without a pin can."""
    displaced = {}
    for pinned in ({"x"}, set()):
        slots = AdapterSlots(2)
        slots.pinned = pinned
        for digest, tenant in (("x", "a"), ("y", "b"), ("z", "b")):
            start(slots, digest, tenant)
            slots.give_back(digest)
        # The other tenant's adapters are wherever it has put them.
        before = {digest for digest in "yz" if slots.rows_of(digest) is not None}
        start(slots, "x", "a")
        displaced[bool(pinned)] = before - {digest for digest in "yz" if slots.rows_of(digest) is not None}
    assert displaced == {True: set(), False: {"y"}}


@hypothesis.given(st.lists(st.sampled_from("uvwx"), max_size=30))
def test_with_a_slot_for_each_adapter_none_is_loaded_twice(used: list[str]) -> None:
    slots = AdapterSlots(4, tenant_share=0.5)
    loaded = []
    for digest in used:
        # The adapters of two tenants.
        assert start(slots, digest, "a" if digest in "uv" else "b") is not None
        slots.give_back(digest)
        loaded += [load.digest for load in slots.take_loads()]
    assert sorted(loaded) == sorted(set(used))


def test_a_tenant_uses_its_share_only() -> None:
    slots = AdapterSlots(4, tenant_share=0.5)
    assert start(slots, "x") is not None
    assert start(slots, "y") is not None
    assert start(slots, "z") is None
    assert start(slots, "x") is not None
    assert start(slots, "z", tenant="b") is not None


def test_a_waiting_adapter_gets_a_slot_although_others_are_always_asked_for() -> None:
    slots = AdapterSlots(1)
    start(slots, "busy")
    for _ in range(3):
        slots.begin_plan()
        assert not slots.may_take("waiting", "b")
        # Its rows end, and no new ones start.
        assert not slots.may_take("busy", "a")
    slots.give_back("busy")
    slots.begin_plan()
    assert slots.may_take("waiting", "b")


def test_when_nobody_waits_any_more_the_adapter_takes_rows_again() -> None:
    slots = AdapterSlots(1)
    start(slots, "busy")
    assert start(slots, "waiting", "b") is None
    slots.begin_plan()
    slots.begin_plan()
    assert slots.may_take("busy", "a")


def test_after_a_loss_everything_is_loaded_again() -> None:
    slots = AdapterSlots(1)
    start(slots, "x")
    slots.take_loads()
    slots.give_back("x")
    slots.forget_all()
    slot = start(slots, "x")
    assert slots.take_loads() == (AdapterLoad(slot, "x"),)  # type: ignore[arg-type]  # it has started


@pytest.mark.parametrize("count", [1, 3])
@hypothesis.given(st.lists(st.tuples(st.sampled_from("uvwxyz"), st.booleans()), max_size=60))
def test_a_slot_has_one_adapter_and_rows_find_theirs(count: int, steps: list[tuple[str, bool]]) -> None:
    """What the workers have in each slot, by the loads that they get, is what rows were told."""
    slots, contents, rows = AdapterSlots(count), dict[int, str](), list[tuple[str, int]]()
    for digest, starts in steps:
        if starts:
            slot = start(slots, digest)
            if slot is not None:
                rows.append((digest, slot))
        elif rows:
            slots.give_back(rows.pop(0)[0])
        contents.update({load.slot: load.digest for load in slots.take_loads()})
        assert all(contents[slot] == digest for digest, slot in rows)
        assert all(0 <= slot < count for slot in contents)
