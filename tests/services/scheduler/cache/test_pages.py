from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.cache.pages import NO_OWNER, PageAllocator
from tests.examples import examples

CAPACITY = 12


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def take(allocator: PageAllocator, count: int) -> np.ndarray:
    pages = allocator.try_allocate(count)
    assert pages is not None
    return pages


class AllocatorMachine(RuleBasedStateMachine):
    """Holders take, share and give back sets of pages; a counter of their pages is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY)
        self.holders: list[np.ndarray] = []

    @rule(count=st.integers(0, CAPACITY + 1))
    def allocate(self, count: int) -> None:
        free_before = {page for page in range(CAPACITY) if self.allocator.counts[page] == 0}
        pages = self.allocator.try_allocate(count)
        assert (pages is None) == (count > len(free_before))
        if pages is not None:
            assert pages.dtype == np.int32
            assert len(set(pages.tolist())) == count
            assert set(pages.tolist()) <= free_before
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99))
    def share(self, pick: int) -> None:
        pages = self.holders[pick % len(self.holders)]
        self.allocator.retain(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99))
    def give_back(self, pick: int) -> None:
        pages = self.holders.pop(pick % len(self.holders))
        held = self.held()
        assert self.allocator.release(pages) == sum(held[page] == 0 for page in pages.tolist())

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), other=st.integers(0, 99))
    def exchange(self, pick: int, other: int) -> None:
        old = self.holders[pick % len(self.holders)]
        new = self.holders[other % len(self.holders)]
        count = min(len(old), len(new))
        self.holders[pick % len(self.holders)] = old[count:]
        self.holders.append(new[:count])
        held = self.held()
        assert self.allocator.exchange(old[:count], new[:count]) == sum(
            held[page] == 0 for page in old[:count].tolist()
        )

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages.tolist())

    @invariant()
    def counts_are_the_holders(self) -> None:
        held = self.held()
        assert self.allocator.counts.tolist() == [held[page] for page in range(CAPACITY)]
        assert self.allocator.references == held.total()
        assert self.allocator.free_pages == CAPACITY - len(+held)
        assert self.allocator.is_consistent()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = examples(40, stateful_step_count=30)


def test_first_pages_are_handed_out_in_ascending_order() -> None:
    assert take(PageAllocator(4), 3).tolist() == [0, 1, 2]


def test_pages_freed_last_are_handed_out_first() -> None:
    allocator = PageAllocator(4)
    allocator.try_allocate(4)
    allocator.release(int32(1, 3))
    allocator.release(int32(0))
    assert take(allocator, 3).tolist() == [0, 3, 1]


def test_nothing_is_taken_when_not_all_pages_can_be() -> None:
    allocator = PageAllocator(3)
    assert allocator.try_allocate(4) is None
    assert allocator.free_pages == 3


def test_double_free_is_an_assertion_and_changes_nothing() -> None:
    allocator = PageAllocator(3)
    pages = take(allocator, 2)
    allocator.release(pages[:1])
    with pytest.raises(AssertionError, match=r"released free pages \[0\]"):
        allocator.release(pages)
    assert allocator.counts.tolist() == [0, 1, 0]
    assert allocator.is_consistent()


def test_one_call_cannot_release_a_page_twice() -> None:
    allocator = PageAllocator(3)
    allocator.try_allocate(1)
    with pytest.raises(AssertionError):
        allocator.release(int32(0, 0))


def test_free_pages_cannot_be_retained() -> None:
    with pytest.raises(AssertionError, match="retained free pages"):
        PageAllocator(3).retain(int32(1))


def test_exchange_of_a_page_for_itself_never_frees_it() -> None:
    allocator = PageAllocator(3)
    pages = take(allocator, 2)
    assert allocator.exchange(pages, pages[::-1]) == 0
    assert allocator.counts.tolist() == [1, 1, 0]


def test_owner_of_the_last_allocation_is_remembered() -> None:
    allocator = PageAllocator(3)
    allocator.try_allocate(2, owner=np.array([7, 8]))
    allocator.release(int32(1))
    assert [allocator.last_owner(page) for page in range(3)] == [7, 8, NO_OWNER]
    allocator.try_allocate(1, owner=9)
    assert allocator.last_owner(1) == 9


def test_counts_cannot_be_written_from_outside() -> None:
    with pytest.raises(ValueError, match="read-only"):
        PageAllocator(3).counts[0] = 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_restored_allocator_hands_out_exactly_the_unreferenced_pages(counts: list[int]) -> None:
    allocator = PageAllocator(len(counts))
    allocator.try_allocate(len(counts) // 2)
    allocator.restore(np.array(counts, np.int32))
    assert allocator.is_consistent()
    free = [page for page, count in enumerate(counts) if count == 0]
    assert take(allocator, len(free)).tolist() == free
    assert allocator.free_pages == 0
