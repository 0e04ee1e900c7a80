"""The user-aware cache does what the oracle of views does; no page is lost, overwritten or seen by another user.

Hypothesis looks for surprising operations; lives drawn by seed are many times faster, so that there can be many.
"""

from __future__ import annotations

import pytest

from services.scheduler.cache.tree import PageTree
from tests.examples import examples
from tests.services.scheduler.cache.random_lives import draw, failure, live_through, shrink
from tests.services.scheduler.cache.user_aware_machine import UserAwareMachine

STEPS = 100
PARTS = 8
OPERATIONS = 200_000

TestUserAware = UserAwareMachine.TestCase
TestUserAware.settings = examples(20, stateful_step_count=40)


def test_a_thousand_operations() -> None:
    assert live_through(range(10), STEPS) == 1_000


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_hundred_thousand_operations(part: int) -> None:
    lives = OPERATIONS // PARTS // STEPS
    assert live_through(range(part * lives, (part + 1) * lives), STEPS) == OPERATIONS // PARTS


def test_defect_is_found_and_shrunk_to_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views that take no notice of owners are seen at once."""
    match = PageTree.match
    monkeypatch.setattr(
        PageTree, "match", lambda self, node, viewer, *rest, **how: match(self, node, node.owner, *rest, **how)
    )
    life = next(life for seed in range(20) if failure(life := draw(seed, STEPS)) is not None)
    assert len(shrink(life).steps) <= 3
