"""Pages that other groups may read are watched: a page that is freed or granted again too early is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from structlog.testing import capture_logs

from services.scheduler.cache.pages import PageAllocator
from services.scheduler.core.lent_pages import LentPages
from services.scheduler.memory_checks import CHECKED_LEASES, MemoryChecks
from tests.services.scheduler.core.harness import Harness, make_request

if TYPE_CHECKING:
    from services.scheduler.core.core import SchedulerCore

PROMPT = list(range(10, 52))


def violations(core: SchedulerCore) -> list[str]:
    with capture_logs() as entries:
        MemoryChecks(core).check()
    return [line for entry in entries if entry["event"] == "memory.lease_violated" for line in entry["violations"]]


def make_lender(harness: Harness | None = None) -> tuple[SchedulerCore, list[int]]:
    """Return a core that has lent the pages of a prompt, and these pages."""
    harness = harness or Harness(cache="user_aware")
    core, request = harness.core, make_request("one", PROMPT)
    core.submit(request, 0.0)
    harness.run()
    pin = core.exports.pin(b"lease", request.view, request.token_ids, 0, None)
    assert pin is not None
    core.exports.lent.lend(b"lease", pin.pages)
    return core, pin.pages.tolist()


def test_pages_that_stay_until_they_are_taken_back_are_right() -> None:
    core, _ = make_lender()
    core.memory.flush()
    assert violations(core) == []
    core.exports.lent.take_back(b"lease")
    core.exports.release(b"lease")
    core.memory.flush()
    assert violations(core) == []
    assert core.memory.allocator.free_pages == core.memory.allocator.capacity


def test_a_lent_page_that_is_free_is_found() -> None:
    core, pages = make_lender()
    core.exports.release(b"lease")
    assert violations(core) == [], "the cache still has them"
    core.memory.flush()
    name = b"lease".hex()
    assert set(violations(core)) <= {f"page {page} of lease {name} is free" for page in pages}
    assert len(core.exports.lent.faults(1)) == len(pages)


@pytest.mark.parametrize("is_freed_again", [False, True])
def test_a_lent_page_that_is_granted_again_is_found(is_freed_again: bool) -> None:
    core, pages = make_lender()
    core.exports.release(b"lease")
    core.memory.flush()
    granted = core.memory.try_allocate(core.memory.allocator.capacity)
    assert granted is not None
    if is_freed_again:
        core.memory.allocator.release(granted)
    found = [fault for fault in core.exports.lent.faults(1) if fault.endswith("was granted again")]
    assert len(found) == len(pages)


def test_workers_that_are_lost_have_no_lent_pages() -> None:
    harness = Harness(cache="user_aware")
    core, _ = make_lender(harness)
    assert len(core.exports.lent) == 1
    harness.lose_workers()
    assert len(core.exports.lent) == 0
    assert violations(core) == []


def test_a_check_looks_at_some_leases_and_at_all_of_them_in_turn() -> None:
    allocator = PageAllocator(100)
    lent = LentPages(allocator)
    for number in range(2 * CHECKED_LEASES + 1):
        pages = allocator.try_allocate(2)
        assert pages is not None
        lent.lend(bytes([number]), pages)
    allocator.release(np.arange(2 * len(lent), dtype=np.int32))
    found: list[str] = []
    for checked in (CHECKED_LEASES, CHECKED_LEASES, 1):
        faults = lent.faults(checked)
        assert len(faults) == 2 * checked
        found += faults
    assert len(set(found)) == 2 * (2 * CHECKED_LEASES + 1)
    assert lent.faults(1) == found[:2]


def test_nothing_is_noted_without_pages() -> None:
    lent = LentPages(PageAllocator(4))
    lent.lend(b"lease", np.zeros(0, np.int32))
    assert len(lent) == 0
