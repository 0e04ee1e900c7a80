from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.steps import EngineSpec
from services.worker.engine.measuring.capacity import MemoryMeasure, count_window_pages, divide, has_window_pool

GIB = 1024**3


def spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {"window_ratio": 0.25, "memory_fraction": 1.0, **changes}
    return EngineSpec("model", **fields)  # type: ignore[arg-type]  # whatever a test wants to change


@pytest.mark.parametrize(
    ("changes", "is_local", "wanted"),
    [
        ({}, (True, False), True),
        ({}, (True, True), False),
        ({}, (False, False), False),
        ({"window_ratio": 0.0}, (True, False), False),
        ({"host_bytes": 1}, (True, False), False),
        ({"host_pages": 3}, (True, False), False),
    ],
)
def test_two_pools_take_layers_of_both_kinds_and_no_host_tier(
    changes: dict[str, object], is_local: tuple[bool, ...], wanted: bool
) -> None:
    assert has_window_pool(spec(**changes), is_local) is wanted


def test_a_requested_number_of_pages_is_used_unchanged() -> None:
    assert count_window_pages(spec(window_pages=7), 1000, 1024) == 7


def test_the_windows_of_all_rows_fit_if_they_may_take_half() -> None:
    # 1,024 tokens and a page are 65 pages, and 2 more.
    assert count_window_pages(spec(max_rows=64), 100_000, 1024) == 25_000
    assert count_window_pages(spec(max_rows=64), 10_000, 1024) == 64 * 67
    assert count_window_pages(spec(max_rows=64), 5000, 1024) == 2500
    # One row with a step of 2,048 tokens always fits, but more pages than the others have are of no use.
    assert count_window_pages(spec(max_rows=64), 300, 1024) == 67 + 128
    assert count_window_pages(spec(max_rows=64), 150, 1024) == 150


@example(47, 0.125, 2864, 29)
@given(st.integers(1, 400), st.floats(0.01, 1.0), st.integers(64, 8192), st.integers(1, 256))
def test_both_pools_use_the_available_memory_and_no_more(gib: int, ratio: float, window: int, rows: int) -> None:
    # As Gemma 3 27B: 10 and 52 layers.
    token_bytes = (10 * 8192, 52 * 8192)
    memory = MemoryMeasure(gib * GIB, gib * GIB)
    pages, window_pages = divide(spec(window_ratio=ratio, max_rows=rows), 131_072, token_bytes, 0, memory, window)
    taken = 16 * (pages * token_bytes[0] + window_pages * token_bytes[1])
    assert window_pages <= pages
    assert taken <= gib * GIB
    if window_pages < pages and gib > 20:
        assert taken > 0.9 * gib * GIB
