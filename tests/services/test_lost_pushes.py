"""Bytes that are lost between scheduler and detokenizer: both agree soon afterwards on which requests are open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.models import resolve_model
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.tokenization import load_text_model
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub
from tests.fakes.proxy import DOWN, UP, LinkProxy
from tests.services.scheduler.pipeline import Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LOSS_S = 1.5


class LossyPipeline(Pipeline):
    """The scheduler with a real detokenizer behind a proxy, and a gateway's subscription to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.proxy = LinkProxy()
        self.hub = Hub(DecoderFactory(load_text_model(resolve_model("smollm2-135m-instruct"))))
        self.finishes: dict[str, common_pb2.Finish] = {}
        self.texts: dict[str, str] = {}

    async def start_detokenizer(self) -> None:
        address = self.address("detokenizer-itself")
        self._detokenizer_server = RpcServer("pando.v1.Detokenizer", address)
        servicer = DetokenizerService(self.hub)
        self._detokenizer_server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, servicer)
        await self._detokenizer_server.start()
        path, target = (name.removeprefix("unix:") for name in (self.address("detokenizer"), address))
        await self._stack.enter_async_context(self.proxy.between(path, target))
        channel = await self._stack.enter_async_context(open_channel(address))
        self.detokenizer_stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        self._subscribed = asyncio.create_task(self._subscribe())

    async def _subscribe(self) -> None:
        async for message in self.detokenizer_stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id="gateway")):
            for delta in message.deltas:
                self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
                if delta.HasField("finish"):
                    self.finishes[delta.request_id] = delta.finish

    async def unknown(self, *request_ids: str) -> set[str]:
        request = detokenizer_pb2.FindUnknownRequest(request_ids=request_ids)
        return set((await self.detokenizer_stub.FindUnknown(request, timeout=30)).request_ids)

    async def stop(self) -> None:
        self._subscribed.cancel()
        await asyncio.gather(self._subscribed, return_exceptions=True)
        await super().stop()


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[LossyPipeline]:
    pipeline = LossyPipeline(tmp_path)
    await pipeline.start()
    await pipeline.ready()
    for worker in pipeline.workers:
        worker.step_s = 0.05
    yield pipeline
    await pipeline.stop()


@pytest.mark.parametrize("directions", [{UP}, {DOWN}, {UP, DOWN}], ids=["up", "down", "both"])
async def test_after_lost_bytes_no_request_is_open_at_one_side_only(
    pipeline: LossyPipeline, directions: set[str]
) -> None:
    await pipeline.submit("before", max_tokens=None)
    await until(lambda: pipeline.texts.get("before"))
    assert await pipeline.unknown("before", "other") == {"other"}
    pipeline.proxy.lossy |= directions
    await pipeline.submit("meanwhile", max_tokens=None)
    await asyncio.sleep(LOSS_S)
    pipeline.proxy.lossy.clear()
    # The gateway is informed of the request that the detokenizer knew, and finds out about the other by asking.
    await until(lambda: "before" in pipeline.finishes)
    await until_state(pipeline, lambda state: not state.requests)
    async with asyncio.timeout(60):
        while await pipeline.unknown("before", "meanwhile") != {"before", "meanwhile"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    error = pipeline.finishes["before"].error
    assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
    number = 0
    while (await pipeline.submit(f"after {number}", max_tokens=4)).HasField("rejected"):
        number += 1
        await asyncio.sleep(0.1)
    await until(lambda: f"after {number}" in pipeline.finishes)
    assert pipeline.finishes[f"after {number}"].reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_push_stream_replaces_the_earlier_one_of_the_same_scheduler(pipeline: LossyPipeline) -> None:
    await pipeline.submit("before", max_tokens=None)
    await until(lambda: pipeline.texts.get("before"))
    # Nothing that the scheduler closes or sends arrives, as if its host were unreachable.
    pipeline.proxy.lossy |= {UP}
    call = pipeline.detokenizer_stub.Push()
    link = next(iter(pipeline.hub._by_scheduler))
    await call.write(detokenizer_pb2.PushRequest(scheduler_id=link))
    await until(lambda: "before" in pipeline.finishes)
    assert pipeline.finishes["before"].error.retryable
    call.cancel()
