from __future__ import annotations

import numpy as np
import pytest

from common.types import Subject, View
from services.scheduler.cache.types import LockId, PrefixLock
from services.scheduler.cache_meter import CacheMeter
from services.scheduler.core.cached_parts import cached_parts
from services.scheduler.core.costs import OperationTimes
from tests.services.scheduler.policy.waiting import waiting_sequence


@pytest.mark.parametrize(
    ("matched", "public", "host", "storage", "found"),
    [
        (0, 0, 0, 0, {}),
        (64, 0, 0, 0, {("device", "private"): 64}),
        (64, 48, 0, 0, {("device", "public"): 48, ("device", "private"): 16}),
        (64, 48, 32, 0, {("device", "public"): 32, ("host", "public"): 16, ("host", "private"): 16}),
        (64, 64, 48, 16, {("device", "public"): 16, ("host", "public"): 32, ("storage", "public"): 16}),
        # What was loaded and gone again before the start was not found.
        (16, 0, 48, 48, {("storage", "private"): 16}),
    ],
)
def test_found_tokens_are_counted_by_tier_and_visibility(
    matched: int, public: int, host: int, storage: int, found: dict[tuple[str, str], int]
) -> None:
    meter = CacheMeter(OperationTimes(lambda: 0.0))
    sequence = waiting_sequence(1)
    sequence.host_tokens, sequence.storage_tokens = host, storage
    pages = np.zeros(matched // 16, np.int32)
    meter.note_start(sequence, PrefixLock(LockId(1), View(Subject("tenant", "ann")), matched, pages, public))
    assert meter.hit_tokens == found


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (64, [("device", "public", 16), ("device", "tenant", 16), ("host", "tenant", 16), ("storage", "private", 16)]),
        (40, [("device", "public", 16), ("device", "tenant", 16), ("host", "tenant", 8)]),
        (16, [("device", "public", 16)]),
        (0, []),
    ],
)
def test_only_found_tokens_of_the_prompt_are_reported(limit: int, parts: list[tuple[str, str, int]]) -> None:
    sequence = waiting_sequence(1)
    sequence.host_tokens, sequence.storage_tokens = 32, 16
    view = View(Subject("tenant", "ann"))
    lock = PrefixLock(LockId(1), view, 64, np.zeros(4, np.int32), public_tokens=16, tenant_tokens=32)
    assert list(cached_parts(sequence, lock, limit)) == parts


def test_operations_are_counted_all_and_measured_now_and_then() -> None:
    now = iter(range(100))
    times = OperationTimes(lambda: float(next(now)))
    double = times.timed("double", lambda value: 2 * value, one_in=4)
    assert [double(value) for value in range(10)] == [2 * value for value in range(10)]
    ((name, cost),) = times
    assert (name, cost.calls, cost.measured_calls) == ("double", 10, 3)
    # Each measured call took one tick.
    assert cost.seconds == 10.0


def test_an_operation_that_fails_is_measured_too() -> None:
    now = iter(range(100))
    times = OperationTimes(lambda: float(next(now)))

    def fail() -> None:
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        times.timed("fail", fail)()
    assert dict(times)["fail"].seconds == 1.0
