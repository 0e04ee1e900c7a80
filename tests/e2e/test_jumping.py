"""Answers with jumps are the same with little memory, streamed, and in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from common.settings import GatewaySettings, SchedulerSettings, Settings
from tests.e2e.conftest import require_model, serve
from tests.e2e.test_structured_output import chat
from tests.services.worker.engine.grammars.corpus import CORPUS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.soak

SCHEMAS = list(CORPUS.values())[::4]


@pytest.fixture(scope="module")
def served_alone(run_root: Path) -> Iterator[Served]:
    """Runs one sequence at a time, with as much memory as it can use."""
    require_model()
    scheduler = SchedulerSettings(max_rows=1)
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler), run_root)


@pytest.fixture(scope="module")
def served_tight(run_root: Path) -> Iterator[Served]:
    require_model()
    scheduler = SchedulerSettings(device_pages=20, max_steps_per_plan=8)
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler), run_root)


def streamed(served: Served, index: int) -> list[str]:
    """Return the texts of two choices, token by token."""
    texts = ["", ""]
    events = chat(served, SCHEMAS[index], n=2, seed=index, temperature=0.8, max_tokens=150, stream=True)
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def test_answers_with_jumps_are_the_same_in_company_as_alone(served_alone: Served, served_tight: Served) -> None:
    """`tests/services/worker/engine/test_jumping.py` compares them with those without jumps."""
    with ThreadPoolExecutor(8) as pool:
        jumping = list(pool.map(lambda index: streamed(served_tight, index), range(len(SCHEMAS))))
    assert jumping == [streamed(served_alone, index) for index in range(len(SCHEMAS))]
    assert served_tight.state().jumped_tokens > 100
    assert served_tight.state().retractions > 0
    assert served_alone.state().jumped_tokens > 100
    assert served_alone.state().retractions == 0
