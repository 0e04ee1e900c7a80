"""What administrators ask of all scheduler groups at once."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import PandoError, PermissionDeniedError
from common.rpc.peers import servers_at
from common.rpc.server import RpcServer
from common.types import ErrorCode, RequestId, Subject
from gateway.pipeline.administration import GrpcAdministration, SchedulerGroups
from gateway.pipeline.port import ScheduledMilestone, ScheduledRequest
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "open sesame"


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Frees some pages for whoever shows the token."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.flushes = 0

    async def FlushCache(self, request: object, context: Any) -> scheduler_pb2.FlushCacheResponse:
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            raise PermissionDeniedError("show the admin token")
        self.flushes += 1
        return scheduler_pb2.FlushCacheResponse(freed_pages=self.pages)

    async def GetState(self, request: object, context: Any) -> scheduler_pb2.GetStateResponse:
        return scheduler_pb2.GetStateResponse(running_rows=self.pages)

    async def GetTimelines(
        self, request: scheduler_pb2.GetTimelinesRequest, context: Any
    ) -> scheduler_pb2.GetTimelinesResponse:
        milestones = [
            scheduler_pb2.Milestone(
                kind=scheduler_pb2.MILESTONE_KIND_STARTED,
                unix_s=5.5,
                wait=scheduler_pb2.WAIT_REASON_MEMORY,
                found=scheduler_pb2.FoundTokens(tokens=32, tenant_tokens=16),
            ),
            scheduler_pb2.Milestone(
                kind=scheduler_pb2.MILESTONE_KIND_ENDED,
                unix_s=7.5,
                finish_reason=common_pb2.FINISH_REASON_LENGTH,
                output_tokens=self.pages,
            ),
        ]
        known = [each for each in request.request_ids if each == f"r{self.pages}" and request.subject.name == "ann"]
        return scheduler_pb2.GetTimelinesResponse(
            timelines=[scheduler_pb2.RequestTimeline(request_id=each, milestones=milestones) for each in known]
        )


def scheduler_with(pages: int) -> Scheduler:
    return Scheduler(pages)  # type: ignore[abstract]  # the generated base answers what it doesn't


@asynccontextmanager
async def running(address: str, scheduler: Scheduler) -> AsyncIterator[None]:
    server = RpcServer("pando.v1.Scheduler", address)
    server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@asynccontextmanager
async def administration(*addresses: str, token: str | None = TOKEN) -> AsyncIterator[GrpcAdministration]:
    groups = SchedulerGroups(servers_at(addresses))
    try:
        yield GrpcAdministration(groups, token)
    finally:
        await groups.close()


async def test_every_group_is_asked(tmp_path: Path) -> None:
    first, second = (f"unix:{tmp_path}/{name}.sock" for name in "ab")
    async with (
        running(first, scheduler_with(3)),
        running(second, scheduler_with(4)),
        administration(first, second) as asking,
    ):
        assert await asking.flush_cache() == 7
        assert [state["running_rows"] for state in await asking.states()] == [3, 4]


async def test_without_the_schedulers_token_nothing_is_flushed(tmp_path: Path) -> None:
    address, scheduler = f"unix:{tmp_path}/a.sock", scheduler_with(3)
    async with running(address, scheduler), administration(address, token=None) as asking:
        with pytest.raises(PandoError) as refused:
            await asking.flush_cache()
        assert (refused.value.code, scheduler.flushes) == (ErrorCode.PERMISSION_DENIED, 0)


async def test_an_unreachable_group_is_reported_after_all_others_were_asked(tmp_path: Path) -> None:
    here, away, scheduler = f"unix:{tmp_path}/a.sock", f"unix:{tmp_path}/b.sock", scheduler_with(3)
    async with running(here, scheduler), administration(away, here) as asking:
        with pytest.raises(PandoError) as failed:
            await asking.flush_cache()
        assert (failed.value.code, scheduler.flushes) == (ErrorCode.UNAVAILABLE, 1)


async def test_a_gateway_without_a_scheduler_reports_the_missing_setting() -> None:
    async with administration() as asking:
        with pytest.raises(PandoError, match=r"gateway\.scheduler"):
            await asking.states()


async def test_the_timeline_comes_from_the_group_that_had_the_request(tmp_path: Path) -> None:
    first, second = (f"unix:{tmp_path}/{name}.sock" for name in "ab")
    async with (
        running(first, scheduler_with(3)),
        running(second, scheduler_with(4)),
        administration(first, second) as asking,
    ):
        ids = [RequestId("r4"), RequestId("unknown")]
        assert await asking.timelines(ids, Subject("acme", "bob")) == []
        found = {"tokens": 32, "public_tokens": 0, "tenant_tokens": 16, "host_tokens": 0, "storage_tokens": 0}
        assert await asking.timelines(ids, Subject("acme", "ann")) == [
            ScheduledRequest(
                "r4",
                (
                    ScheduledMilestone("started", 5.5, 0, wait="memory", found=found),
                    ScheduledMilestone("ended", 7.5, 0, finish_reason="length", output_tokens=4),
                ),
            )
        ]
