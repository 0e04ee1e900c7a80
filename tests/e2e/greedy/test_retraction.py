"""Greedy answers are those of `transformers` in fp32 although rows lose their pages on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode
from tests.e2e.greedy.checks import GROWING, TIGHT_PAGES, TIMEOUT_S, check_retraction, serve_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def tight(run_root: Path) -> Iterator[Served]:
    """A deployment with few pages."""
    yield from serve_rows(run_root, device_pages=TIGHT_PAGES)


def test_retraction_does_not_change_the_output(tight: Served) -> None:
    check_retraction(tight, CacheMode.DEFAULT, (GROWING,))


@pytest.mark.extended
@pytest.mark.parametrize("cache_mode", CacheMode)
def test_retraction_of_a_long_row_does_not_change_the_output(tight: Served, cache_mode: CacheMode) -> None:
    check_retraction(tight, cache_mode, (GROWING[::-1],))
