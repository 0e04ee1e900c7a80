"""Boundaries by the clock: within an epoch, what has enough evidence becomes shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.gen.pando.v1 import scheduler_pb2
from tests.services.scheduler.pipeline import Pipeline
from tests.services.scheduler.test_cache_service import USERS, serve_all, until_shared

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_prompt_is_shared_long_before_its_epoch_ends(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, cache={"epoch_seconds": 1e6, "sharing_seconds": 0.3, "quota_share": 1.0})
    await pipeline.start()
    try:
        await pipeline.ready()
        await serve_all(pipeline, *USERS)
        node = await until_shared(pipeline)
        assert node.visibility == scheduler_pb2.VISIBILITY_TENANT
    finally:
        await pipeline.stop()
