"""The user-aware cache does what the oracle of views does; no page is lost, overwritten or seen by another user."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.services.scheduler.cache.user_aware_machine import UserAwareMachine

TestUserAware = UserAwareMachine.TestCase
TestUserAware.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_operations() -> None:
    run_state_machine_as_test(
        UserAwareMachine, settings=settings(max_examples=2000, stateful_step_count=100, deadline=None)
    )
