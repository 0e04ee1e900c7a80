"""Greedy answers are those of `transformers` in fp32 where two tensor-parallel ranks compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode
from tests.e2e.greedy.checks import (
    GROWING,
    SHORT,
    TIGHT_PAGES,
    TIMEOUT_S,
    check_alone,
    check_cached_answers,
    check_retraction,
    check_scores,
    check_together,
    pick,
    serve_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = [pytest.mark.extended, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def two_ranks(run_root: Path) -> Iterator[Served]:
    """A deployment with two workers, and few pages."""
    yield from serve_rows(run_root, device_pages=TIGHT_PAGES, ranks=2)


def test_alone(two_ranks: Served) -> None:
    one_of_each = pick(
        "english-physics",
        "chinese-capitals",
        "code-python",
        "emoji-flags",
        "one-token-word",
        "chat-sum",
    )
    check_alone(two_ranks, one_of_each)


def test_sixteen_together_with_cold_and_with_cached_prompts(two_ranks: Served) -> None:
    check_together(two_ranks, SHORT)


def test_continued_answers_are_served_from_the_cache(two_ranks: Served) -> None:
    check_cached_answers(two_ranks, GROWING[1:])


def test_prompts_are_scored(two_ranks: Served) -> None:
    check_scores(two_ranks, ("english-physics", "length-63"))


def test_retraction_does_not_change_the_output(two_ranks: Served) -> None:
    check_retraction(two_ranks, CacheMode.DEFAULT, (GROWING,))
