"""How many examples a property test tries."""

from __future__ import annotations

from hypothesis import settings

# The profile of `make soak`; see conftest.py.
EXPLORING = "exploring"
SOAK_FACTOR = 10


def is_exploring() -> bool:
    return settings.get_current_profile_name() == EXPLORING


def examples(count: int, stateful_step_count: int = 50) -> settings:
    """Return settings for `count` examples, the same ones in each run, and for many other ones in `make soak`."""
    number = count * SOAK_FACTOR if is_exploring() else count
    return settings(max_examples=number, stateful_step_count=stateful_step_count)
