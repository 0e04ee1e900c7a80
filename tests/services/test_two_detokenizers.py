"""A scheduler with two real detokenizers: each request's output takes the way that its gateway has chosen."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

import grpc
import pytest

from common.models import resolve_model
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.rpc.stream import wait_until_accepted
from common.tokenization import load_text_model
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub
from tests.services.scheduler.pipeline import Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NUMBERS = (0, 1)


class Desk:
    """One detokenizer, and a gateway's subscription to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.texts: dict[str, str] = {}
        self.finishes: dict[str, common_pb2.Finish] = {}
        self.process: str | None = None
        self._decoders = DecoderFactory(load_text_model(resolve_model("smollm2-135m-instruct")))

    async def start(self) -> None:
        self.hub = Hub(self._decoders)
        self._server = RpcServer("pando.v1.Detokenizer", self.address)
        self._server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, DetokenizerService(self.hub))
        await self._server.start()
        self._channel = open_channel(self.address)
        stub = detokenizer_pb2_grpc.DetokenizerStub(self._channel)
        call = stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id="gateway"), wait_for_ready=True)
        self.process = (await wait_until_accepted(call)).process
        self._reading = asyncio.create_task(self._read(call))

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(
        self, call: grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse]
    ) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for message in call:
                for delta in message.deltas:
                    self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
                    if delta.HasField("finish"):
                        self.finishes[delta.request_id] = delta.finish


class TwoDesks(Pipeline):
    """The scheduler between fake workers and two detokenizers."""

    def __init__(self, folder: Path) -> None:
        addresses = [f"unix:{folder}/detokenizer{number}.sock" for number in NUMBERS]
        super().__init__(folder, detokenizer=tuple(addresses), max_rows=8)
        self.desks = [Desk(address) for address in addresses]

    async def start_detokenizer(self) -> None:
        for desk in self.desks:
            await desk.start()

    async def stop_detokenizer(self) -> None:
        for desk in self.desks:
            await desk.stop()

    async def run(self, name: str, desk: Desk, max_tokens: int | None = None) -> common_pb2.Admission:
        """Submit a request as soon as the scheduler is connected to the detokenizer of its output."""
        attempts = 0
        answer = await self.submit(f"{name}0", max_tokens=max_tokens, detokenizer=desk.process)
        while answer.HasField("rejected"):
            assert (answer.rejected.code, answer.rejected.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
            attempts += 1
            await asyncio.sleep(0.05)
            answer = await self.submit(f"{name}{attempts}", max_tokens=max_tokens, detokenizer=desk.process)
        return answer


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[TwoDesks]:
    pipeline = TwoDesks(tmp_path)
    await pipeline.start()
    await pipeline.ready()
    for worker in pipeline.workers:
        worker.step_s = 0.02
    yield pipeline
    await pipeline.stop()


async def test_each_request_has_its_output_at_the_detokenizer_that_it_names(pipeline: TwoDesks) -> None:
    assert len({desk.process for desk in pipeline.desks}) == 2
    names = [
        [(await pipeline.run(f"{user}{number}-", desk, 20)).request_id for user in "abc"]
        for number, desk in enumerate(pipeline.desks)
    ]
    for own, other in (NUMBERS, NUMBERS[::-1]):
        desk = pipeline.desks[own]
        await until(partial(lambda desk, own: set(desk.finishes) == set(own), desk, names[own]))
        assert {finish.reason for finish in desk.finishes.values()} == {common_pb2.FINISH_REASON_LENGTH}
        assert set(desk.texts) == set(names[own])
        assert not set(desk.texts) & set(names[other])
    # The fake engine's tokens depend on the prompt only, so text that lacks a piece would differ.
    assert len({text for desk in pipeline.desks for text in desk.texts.values()}) == 1


async def test_only_the_requests_of_a_dead_detokenizer_end_with_it(pipeline: TwoDesks) -> None:
    dying, staying = pipeline.desks
    lost = (await pipeline.run("lost", dying)).request_id
    kept = (await pipeline.run("kept", staying)).request_id
    await until(lambda: dying.texts.get(lost) and staying.texts.get(kept))
    former = dying.process
    await dying.stop()
    await until_state(pipeline, lambda state: [each.request_id for each in state.requests] == [kept])
    so_far = len(staying.texts[kept])
    await until(lambda: len(staying.texts[kept]) > so_far)
    refused = await pipeline.submit("refused", detokenizer=former)
    assert (refused.rejected.code, refused.rejected.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
    await dying.start()
    assert dying.process != former
    again = (await pipeline.run("again", dying, 4)).request_id
    await until(lambda: again in dying.finishes)
    assert kept not in staying.finishes
    await pipeline.abort(kept)
    await until(lambda: kept in staying.finishes)
    assert staying.finishes[kept].reason == common_pb2.FINISH_REASON_ABORT


async def test_a_request_that_names_none_of_several_detokenizers_is_refused(pipeline: TwoDesks) -> None:
    answer = await pipeline.submit("nameless")
    assert (answer.rejected.code, answer.rejected.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
    assert "not connected to this detokenizer" in answer.rejected.message
