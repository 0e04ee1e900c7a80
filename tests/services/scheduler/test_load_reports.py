"""The load that a scheduler reports to tokenizers, without being asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.scheduler import service
from tests.services.scheduler.pipeline import Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(tmp_path)
    await pipeline.start()
    await pipeline.ready()
    yield pipeline
    await pipeline.stop()


async def test_a_stream_begins_with_a_report_and_changes_follow(pipeline: Pipeline) -> None:
    await until(lambda: pipeline.loads and pipeline.loads[-1].serves)
    assert pipeline.loads[-1].open_choices == 0
    room = pipeline.loads[-1].free_tokens
    assert room > 0
    for number in range(6):
        assert not (await pipeline.submit(f"r{number}", max_tokens=None)).HasField("rejected")
        # With the admission comes the load that includes it; earlier requests may have ended.
        assert 1 <= pipeline.loads_with[f"r{number}"].open_choices <= number + 1
    assert pipeline.loads_with["r0"].free_tokens < room
    before = len(pipeline.loads)
    for number in range(6):
        await pipeline.abort(f"r{number}")
    await until(lambda: pipeline.loads[-1].open_choices == 0)
    assert len(pipeline.loads) > before


async def test_an_unchanged_load_is_not_repeated(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    await until(lambda: pipeline.loads and pipeline.loads[-1].serves)
    before = len(pipeline.loads)
    monkeypatch.setattr(service, "LOAD_INTERVAL_S", 0.001)
    await pipeline.submit("one", max_tokens=4)
    await pipeline.finished("one")
    await until(lambda: pipeline.loads[-1].open_choices == 0)
    # The admission, at most one report of each load that follows, and the end.
    assert before < len(pipeline.loads) <= before + 4


async def test_a_scheduler_without_workers_reports_that_it_serves_nothing(pipeline: Pipeline) -> None:
    await until(lambda: pipeline.loads and pipeline.loads[-1].serves)
    await pipeline.stop_workers()
    await until(lambda: not pipeline.loads[-1].serves)
    await pipeline.start_workers()
    await until(lambda: pipeline.loads[-1].serves)
