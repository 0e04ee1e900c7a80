"""The limits file as a running scheduler follows it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from tests.services.scheduler.pipeline import ADMIN, Pipeline

if TYPE_CHECKING:
    from pathlib import Path


async def test_stated_limits_hold_and_other_ones_do_as_soon_as_the_file_changes(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default.each_subject]\nwaiting = 1\n")
    pipeline = Pipeline(tmp_path, limits_file=limits)
    await pipeline.start()
    try:
        await pipeline.ready()
        await pipeline.stub.Pause(scheduler_pb2.PauseRequest(), metadata=ADMIN)
        assert not (await pipeline.submit("first")).HasField("rejected")
        refused = (await pipeline.submit("second")).rejected
        assert refused.code == common_pb2.ERROR_CODE_QUEUE_FULL
        assert refused.message == "1 requests of this user are waiting, of which 1 may; try again later"
        assert refused.retry_after_ms > 0
        assert not (await pipeline.submit("other", user="bob")).HasField("rejected")
        limits.write_text("[default.each_subject]\nwaiting = 'two'\n")
        await asyncio.sleep(1.5)
        assert (await pipeline.submit("third")).HasField("rejected")
        limits.write_text("[default.each_subject]\nwaiting = 2\n")
        async with asyncio.timeout(60):
            number = 0
            while (await pipeline.submit(f"again {number}")).HasField("rejected"):
                number += 1
                await asyncio.sleep(0.1)
    finally:
        await pipeline.stop()


async def test_a_malformed_file_stops_the_start(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nwait = 1\n")
    pipeline = Pipeline(tmp_path, limits_file=limits)
    await pipeline.start()
    try:
        with pytest.raises(ConfigurationError, match=r"limits\.toml: default\.wait"):
            await asyncio.wait_for(asyncio.shield(pipeline.running), 60)
    finally:
        await pipeline.stop()
