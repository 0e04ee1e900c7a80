"""The room that a group reports: pages that rows could get, less those that open requests are expected to need."""

from __future__ import annotations

import pytest

from common.types import EXPECTED_OUTPUT_TOKENS
from services.scheduler.core.free_room import PARTS
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.scheduler.core.test_reservations import LENGTH, Arriving

PAGES, PAGE = 640, 4
PART = PAGES // PARTS * PAGE
CAPACITY = PAGES * PAGE


def harness(max_rows: int = 4) -> Harness:
    return Harness(pages=PAGES, max_context=CAPACITY, max_step_tokens=64, max_rows=max_rows)


def submit(harness: Harness, name: str, length: int, max_tokens: int | None, user: str = "alice") -> None:
    prompt = [(7 * position + len(name)) % 800 + 10 for position in range(length)]
    assert harness.core.submit(make_request(name, prompt, max_tokens=max_tokens, user=user), 0.0).rejected is None


def step(harness: Harness) -> None:
    harness.plan()
    assert harness.result()


def test_an_idle_group_has_room_for_all_its_pages() -> None:
    assert harness().core.free_tokens == CAPACITY


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_a_request_takes_its_prompt_and_its_output_whether_it_waits_or_runs(steps: int) -> None:
    bench = harness()
    submit(bench, "a", 100, 60)
    for _ in range(steps):
        step(bench)
    assert bench.core.free_tokens == (CAPACITY - 160) // PART * PART


def test_no_more_output_is_expected_than_usual() -> None:
    bench = harness()
    submit(bench, "a", 100, 2000)
    assert bench.core.free_tokens == (CAPACITY - 100 - EXPECTED_OUTPUT_TOKENS) // PART * PART
    step(bench)
    step(bench)
    grown = CAPACITY - 100 - EXPECTED_OUTPUT_TOKENS
    assert bench.core.free_tokens is not None
    assert grown - 2 * PART <= bench.core.free_tokens <= grown


def test_a_group_whose_requests_need_more_than_there_is_has_none() -> None:
    bench = harness(max_rows=2)
    for number in range(40):
        submit(bench, f"{number}", 300, 100)
    assert bench.core.free_tokens == 0
    step(bench)
    assert bench.core.free_tokens == 0


def test_device_pages_that_wait_for_another_groups_prompt_count_once() -> None:
    arriving = Arriving(pages=PAGES)
    fetch = arriving.remote("a", "one", max_tokens=2)
    before = arriving.harness.core.free_tokens
    arriving.step()
    assert fetch.held_pages > 0
    assert arriving.harness.core.free_tokens == before == CAPACITY - (LENGTH + 2) // PART * PART - PART


def test_a_queue_that_has_emptied_expects_nothing() -> None:
    bench = Harness(pages=40, max_rows=4, policy="fair")
    for number in range(8):
        submit(bench, f"{number}", 30, 60, user=f"user-{number}")
    for _ in range(5):
        step(bench)
    assert bench.core.queue.expected_tokens == sum(each.expected_tokens for each in bench.core.queue)
    bench.run()
    assert bench.core.memory.retractions > 0
    assert bench.core.queue.expected_tokens == 0
    assert bench.core.free_tokens == 40 * PAGE


def test_what_only_the_cache_holds_is_room() -> None:
    """So the room reveals nothing of what others have sent before."""
    bench = harness()
    submit(bench, "a", 400, 4)
    bench.run()
    assert bench.cache.evictable_pages > 0
    assert bench.core.free_tokens == CAPACITY


def test_a_pool_for_windows_limits_the_room_by_its_share_alone() -> None:
    """A long request needs few window pages at a time, so room for requests is not that for single pages."""
    bench = Harness(pages=PAGES, max_context=CAPACITY, max_step_tokens=64, window=16, window_pool=PAGES // 4)
    assert bench.core.free_tokens == CAPACITY
    submit(bench, "a", 1000, 60)
    assert bench.core.free_tokens == (CAPACITY - 1060) // PART * PART
    for _ in range(3):
        step(bench)
    windows = bench.core.memory.windows
    assert windows is not None
    share = windows.pool.available_pages / windows.pool.capacity
    assert share < 1
    assert bench.core.free_tokens is not None
    assert 0 < bench.core.free_tokens <= min(share * CAPACITY, CAPACITY - 1060)
    bench.run()
    assert bench.core.free_tokens == CAPACITY


def test_a_model_without_kv_reports_no_room() -> None:
    assert Harness(is_encoder=True).core.free_tokens is None
