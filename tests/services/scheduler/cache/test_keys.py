from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.keys import PagedKey

tokens = st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=24)


def key(ids: list[int], page_size: int) -> PagedKey:
    return PagedKey(np.array(ids, np.int32), page_size)


@given(tokens, st.integers(1, 5))
def test_pages_are_the_whole_ones(ids: list[int], page_size: int) -> None:
    paged = key(ids, page_size)
    assert paged.pages == len(ids) // page_size
    for index in range(paged.pages):
        page = ids[index * page_size : (index + 1) * page_size]
        assert np.frombuffer(paged.page(index), np.int32).tolist() == page
        assert paged.page(index) == paged.slice(index, index + 1)


@given(tokens, tokens, st.integers(1, 4), st.integers(0, 3))
def test_common_pages_are_counted_from_both_starts(
    ours: list[int], edge: list[int], page_size: int, first: int
) -> None:
    paged, other = key(ours, page_size), key(edge, page_size)
    expected = 0
    while (
        first + expected < paged.pages
        and expected < other.pages
        and paged.page(first + expected) == other.page(expected)
    ):
        expected += 1
    assert paged.common_pages(other.slice(0, other.pages), first, max(paged.pages, first)) == expected


def test_token_that_differs_in_its_highest_byte_only_is_no_match() -> None:
    edge = key([1, 2, 3, 4], 2).slice(0, 2)
    assert key([1, 2, 3, 4 + (1 << 24)], 2).common_pages(edge, 0, 2) == 1


def test_strided_ids_are_read_in_their_own_order() -> None:
    ids = np.arange(8, dtype=np.int32)[::2]
    assert PagedKey(ids, 2).page(1) == np.array([4, 6], np.int32).tobytes()


def test_other_integer_types_match_as_int32_does() -> None:
    assert PagedKey(np.array([5, 6], np.int64), 2).page(0) == key([5, 6], 2).page(0)
