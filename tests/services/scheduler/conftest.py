from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.services.scheduler.pipeline import Pipeline

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
