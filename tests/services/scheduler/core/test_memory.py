from __future__ import annotations

from services.scheduler.core.sequence import Sequence
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver
from tests.services.scheduler.core.harness import Harness, make_request

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def test_hits_are_counted_once_however_often_a_waiting_request_is_looked_at() -> None:
    memory = Harness(cache="user_aware", rules=PLAIN).core.memory
    driver = Driver("user_aware", config=PLAIN)
    driver.allocator, driver.cache = memory.allocator, memory.cache
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    request = make_request("waiting", [*SYSTEM, 9, 9], user="dan")
    sequence = Sequence(request, 0, 1, request.sampling, request.token_ids, 100, 0.0)
    # With so many spare pages wanted, it does not fit; or it fits until its own prefix is locked, and then no more.
    for spare in (1_000, memory.available_pages - 1):
        for _ in range(50):
            assert memory.match(sequence) == 8
            assert memory.try_admit(sequence, spare) is None
    assert memory.try_admit(sequence, 0) is not None
    assert [(node.hits, node.users) for node in driver.cache.dump() if node.owner is None] == [(1, 1)]
