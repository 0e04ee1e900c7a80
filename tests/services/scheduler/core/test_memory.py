from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.sequence import Sequence
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver
from tests.services.scheduler.core.harness import Harness, make_request, with_options

if TYPE_CHECKING:
    from common.types import ScheduleRequest

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def test_hits_are_counted_once_however_often_a_waiting_request_is_looked_at() -> None:
    memory = Harness(cache="user_aware", rules=PLAIN).core.memory
    driver = Driver("user_aware", config=PLAIN)
    driver.allocator, driver.cache = memory.allocator, memory.cache
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    request = make_request("waiting", [*SYSTEM, 9, 9], user="dan")
    sequence = Sequence(request, 0, 1, request.options.sampling, request.token_ids, 100, 0.0)
    # With so many spare pages wanted, it does not fit; or it fits until its own prefix is locked, and then no more.
    for spare in (1_000, memory.available_pages - 1):
        for _ in range(50):
            assert memory.match(sequence) == 8
            assert memory.try_admit(sequence, spare) is None
    assert memory.try_admit(sequence, 0) is not None
    assert [(node.hits, node.users) for node in driver.cache.dump() if node.owner is None] == [(1, 1)]


def run(harness: Harness, request: ScheduleRequest) -> None:
    harness.core.submit(request, 0.0)
    while list(harness.core.open_sequences):
        harness.plan()
        harness.result()


def test_choices_of_one_request_are_one_hit() -> None:
    harness = Harness(cache="user_aware", rules=PLAIN)
    for user in ("ann", "bob", "cid"):
        run(harness, make_request(user, [*SYSTEM, 9], user=user, max_tokens=1))
    harness.cache.advance(1)
    run(harness, make_request("many", [*SYSTEM, 9, 9], user="dan", n=4, max_tokens=1))
    assert [(node.hits, node.users) for node in harness.cache.dump() if node.owner is None] == [(1, 1)]


def test_session_of_a_request_reaches_the_cache() -> None:
    harness = Harness(cache="user_aware", rules=PLAIN)
    request = make_request("one", [*SYSTEM, 9, 9], user="dan", max_tokens=1)
    run(harness, with_options(request, session="monday"))
    assert harness.cache.forget(request.view.subject, "tuesday") == 0
    assert harness.cache.forget(request.view.subject, "monday") == 2
