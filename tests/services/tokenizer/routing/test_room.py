"""Requests routed to the cores of two groups: a full group preempts none of them while the other one has room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.tokenizer.routing.policies import (
    LOAD_FACTOR,
    PrefixAware,
    RoutingCandidate,
    affinity_key,
    expected_tokens,
    with_room,
)
from tests.services.scheduler.core.harness import Harness, make_request

# A group has room for three requests of the test.
PAGES, PAGE, PROMPT, OUTPUT = 64, 4, 40, 40
REQUESTS = 6


def retractions(*, by_room: bool) -> list[int]:
    """Return the number of retractions of each group, of requests that have one favourite."""
    groups = {name: Harness(pages=PAGES, page_size=PAGE, max_rows=8, max_step_tokens=256) for name in ("a:1", "b:1")}
    policy = PrefixAware(LOAD_FACTOR)
    for number in range(REQUESTS):
        candidates = [
            RoutingCandidate(name, len(list(group.core.open_sequences)), group.core.free_tokens if by_room else None)
            for name, group in groups.items()
        ]
        # Beginnings are too short to be kept, so that each request needs memory of its own.
        request = make_request(f"r{number}", [11 + number] * PROMPT, max_tokens=OUTPUT)
        request = replace(request, routing_key="all")
        chosen = policy.choose(affinity_key(request), with_room(candidates, expected_tokens(request)))
        assert groups[chosen].core.submit(request, 0.0).rejected is None
    for group in groups.values():
        group.run()
    return [group.core.memory.retractions for group in groups.values()]


@pytest.mark.parametrize("by_room", [False, True])
def test_a_full_group_does_not_preempt_while_another_one_has_room(*, by_room: bool) -> None:
    assert (sum(retractions(by_room=by_room)) == 0) is by_room
