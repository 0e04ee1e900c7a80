"""How many examples a property test tries, and which of many cases `make test` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet

Case = TypeVar("Case")

# The profile of `make soak`; see conftest.py.
EXPLORING = "exploring"
SOAK_FACTOR = 10


def is_exploring() -> bool:
    return settings.get_current_profile_name() == EXPLORING


def one_in(count: int, cases: Iterable[Case]) -> list[Case | ParameterSet]:
    """Return all `cases`; of each `count`, `make test` runs the first, and `make extended` the others.

    For cases that show one behaviour again: seeds, schemas, families that differ in nothing that is tested.
    """
    return [
        case
        if place % count == 0
        else pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.extended)
        for place, case in enumerate(cases)
    ]


def examples(count: int, stateful_step_count: int = 50) -> settings:
    """Return settings for `count` examples, the same ones in each run, and for many other ones in `make soak`."""
    number = count * SOAK_FACTOR if is_exploring() else count
    return settings(max_examples=number, stateful_step_count=stateful_step_count)
