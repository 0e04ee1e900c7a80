"""Every layout of a group gives the answers of a single rank: random requests to tiny models, while services die."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.layouts.arrangements import ARRANGEMENTS
from tests.layouts.runs import LayoutRuns

if TYPE_CHECKING:
    from pathlib import Path

# Variables that set the number of requests to all layouts together, and what draws them.
REQUESTS, SEED = "LAYOUT_REQUESTS", "LAYOUT_SEED"


@pytest.fixture(scope="module")
def runs(run_root: Path) -> LayoutRuns:
    return LayoutRuns(run_root, int(os.environ.get(SEED, "0")))


@pytest.mark.soak
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_random_requests_are_answered_as_by_one_rank_while_services_die(
    name: str, runs: LayoutRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = runs.run(name, int(os.environ.get(REQUESTS, "600")) // len(ARRANGEMENTS))
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome}\n")
    assert outcome.requests > 0
    assert not outcome.problems, "\n".join(outcome.problems)
