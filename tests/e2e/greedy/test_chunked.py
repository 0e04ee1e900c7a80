"""Greedy answers are those of `transformers` in fp32 where prompts are computed in pieces, between decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.greedy.checks import (
    REFERENCES,
    TIMEOUT_S,
    check_alone,
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
def chunked(run_root: Path) -> Iterator[Served]:
    """A deployment that needs 32 steps and more for the longest prompts."""
    yield from serve_rows(run_root, max_step_tokens=64)


def test_alone(chunked: Served) -> None:
    check_alone(chunked, pick("length-65", "length-300", "length-2000-chinese"))


def test_prompts_are_scored(chunked: Served) -> None:
    check_scores(chunked, ("length-300", "english-physics"))


def test_sixteen_together_with_cold_and_with_cached_prompts(chunked: Served) -> None:
    check_together(chunked, REFERENCES)
