"""How many requests of one server, tenant and subject may wait, and whose bound a refusal names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import QueueFullError
from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import ErrorCode, Subject
from services.scheduler.core.queue import WaitingQueue
from services.scheduler.policy.policies import FirstComeFirstServed
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.scheduler.policy.waiting import waiting_sequence

if TYPE_CHECKING:
    from common.types import RequestFailure

PROMPT = list(range(10, 20))


def paused(max_waiting: int, limits: Limits | None = None) -> Harness:
    harness = Harness(max_waiting=max_waiting, limits=limits)
    harness.core.pause(paused=True)
    return harness


def submit(harness: Harness, number: int, user: str, tenant: str = "tenant", n: int = 1) -> RequestFailure | None:
    request = make_request(f"{tenant} {user} {number}", PROMPT, user=user, tenant=tenant, n=n)
    return harness.core.submit(request, 0.0).rejected


def flood(harness: Harness, user: str, tenant: str = "tenant") -> tuple[int, RequestFailure]:
    """Ask until refused; return how many were let in, and the refusal."""
    for number in range(10_000):
        failure = submit(harness, number, user, tenant)
        if failure is not None:
            return number, failure
    raise AssertionError("it is never refused")


def test_one_subject_s_flood_leaves_room_for_others_and_is_refused_with_its_limit() -> None:
    harness = paused(100)
    waiting, failure = flood(harness, "eve")
    assert waiting == 60
    assert failure.code is ErrorCode.QUEUE_FULL
    assert failure.retryable
    assert failure.retry_after_ms
    assert failure.message == (
        "60 requests of this user are waiting, which is its limit while 60 wait in all; try again later"
    )
    for number in range(10):
        assert submit(harness, number, f"user {number}") is None
    harness.core.pause(paused=False)
    harness.run()
    assert len(harness.finishes) == 70
    assert submit(harness, 10_001, "eve") is None


def test_names_invented_in_one_tenant_fill_its_part_of_the_queue_and_no_more() -> None:
    harness = paused(100)
    refused: list[RequestFailure] = []
    for number in range(500):
        failure = submit(harness, number, f"invented {number}")
        refused += [failure] if failure else []
    assert len(harness.core.queue) == 75
    assert refused[0].message.startswith("75 requests of this organization are waiting")
    # A tenant that asks little is let in, and so is each of several floods to some part.
    assert [submit(harness, number, "ann", "other") for number in range(5)] == [None] * 5
    for tenant in ("third", "fourth"):
        assert submit(harness, 0, "bob", tenant) is None


def test_stated_bounds_hold_and_are_named() -> None:
    stated = TenantLimits(waiting=4, each_subject=SubjectLimits(waiting=2), subjects={"vip": SubjectLimits(waiting=3)})
    harness = paused(100, Limits(tenants={"acme": stated}))
    counted, failure = flood(harness, "ann", "acme")
    assert (counted, failure.message) == (2, "2 requests of this user are waiting, of which 2 may; try again later")
    counted, failure = flood(harness, "vip", "acme")
    assert counted == 2
    assert failure.message == "4 requests of this organization are waiting, of which 4 may; try again later"
    assert flood(harness, "ann")[0] > 4
    harness.core.adopt(Limits(tenants={"acme": TenantLimits(waiting=50)}))
    assert submit(harness, 99, "ann", "acme") is None


def test_a_request_with_more_choices_than_the_waiting_limit_is_refused() -> None:
    harness = paused(100, Limits(default=TenantLimits(each_subject=SubjectLimits(waiting=2))))
    failure = submit(harness, 0, "ann", n=3)
    assert failure is not None
    assert failure.message == "0 requests of this user are waiting, of which 2 may; try again later"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_queues_admit_as_many_requests_as_their_size(size: int) -> None:
    harness = paused(size)
    for number in range(size):
        assert submit(harness, 0, f"user {number}", f"tenant {number}") is None
    failure = submit(harness, 1, "late", "late")
    assert failure is not None
    assert f"the queue of this server is full, with {size} waiting requests" in failure.message


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3)), max_size=200),
    st.integers(8, 60),
)
def test_a_flood_of_few_tenants_leaves_room_for_a_subject_with_nothing_waiting(
    asked: list[tuple[int, int, int]], size: int
) -> None:
    """Four tenants, each with any subjects, never fill a queue of eight or more to the last place."""
    queue, handle = WaitingQueue(FirstComeFirstServed()), 0
    for tenant, user, choices in asked:
        subject = Subject(f"tenant {tenant}", f"user {user}")
        try:
            queue.check_room(subject, choices, size, Limits())
        except QueueFullError:
            continue
        for _ in range(choices):
            queue.add(waiting_sequence(handle, user=subject.name, tenant=subject.tenant))
            handle += 1
    present = {sequence.request.view.subject.tenant for sequence in queue}
    # With t tenants at 3 times what is left, 1 of 3t + 1 places is left; one that comes with several may take it.
    if len(present) * 3 + 1 <= size and max((choices for *_, choices in asked), default=1) == 1:
        queue.check_room(Subject("new", "new"), 1, size, Limits())
