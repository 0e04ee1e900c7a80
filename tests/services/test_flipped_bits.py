"""Flipped bits between gateway and tokenizer without TLS: no request hangs, and the next one is served."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from common.models import resolve_model
from common.requests import GenerateRequest
from common.rpc.peers import servers_at
from common.rpc.server import RpcServer
from common.tokenization import load_text_model
from common.types import Admission, RequestFailure, RequestId, RequestOptions, Subject, View
from gateway.metrics import GatewayMetrics
from gateway.pipeline.client import GrpcPipeline
from protos.gen.pando.v1 import detokenizer_pb2_grpc
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub
from tests.fakes.proxy import DOWN, UP, LinkProxy
from tests.services.tokenizer.test_service import MODEL, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from common.deltas import Delta

# Of each direction; all connections are tested at the same time.
FLIPS = 24


class Outcomes:
    """The answers about one request."""

    def __init__(self) -> None:
        self.admission: Admission | None = None
        self.failure: RequestFailure | None = None

    @property
    def is_known(self) -> bool:
        return self.admission is not None or self.failure is not None

    def on_admission(self, admission: Admission) -> None:
        self.admission = admission

    def on_delta(self, delta: Delta) -> None:
        """No text is generated."""

    def on_lost(self, request_id: RequestId, failure: RequestFailure) -> None:
        self.failure = failure


def flip(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


async def survive(number: int, direction: str, folder: Path, tokenizer: str, detokenizer: str) -> None:
    """Submit a request while a bit of its message, or of an answer, flips; then submit others until one is admitted."""
    chance = random.Random(number)
    proxy = LinkProxy()
    async with AsyncExitStack() as stack:
        path = folder / f"{direction}{number}.sock"
        await stack.enter_async_context(proxy.between(str(path), tokenizer.removeprefix("unix:")))
        metrics = GatewayMetrics(CollectorRegistry())
        pipeline = GrpcPipeline(servers_at([f"unix:{path}"]), servers_at([detokenizer]), metrics)
        running = asyncio.create_task(pipeline.run())
        try:
            await until(lambda: pipeline.is_linked and pipeline.is_subscribed)
            proxy.changes[direction] = lambda data: flip(chance, data)
            for attempt in range(100):
                if attempt:
                    await until(lambda: pipeline.is_linked and pipeline.is_subscribed)
                request_id = RequestId(f"{direction}-{number}-{attempt}")
                outcomes = Outcomes()
                view = View(Subject("t", "u"))
                pipeline.submit(
                    GenerateRequest(request_id, view, MODEL, "a prompt of some words", RequestOptions()), outcomes
                )
                await until(lambda outcomes=outcomes: outcomes.is_known)  # type: ignore[misc]
                if attempt and outcomes.admission is not None and outcomes.admission.rejected is None:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("no request is admitted any more")
            assert not proxy.changes
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("direction", [UP, DOWN])
async def test_a_flipped_bit_leaves_no_request_without_an_answer_and_the_next_one_is_served(
    tmp_path: Path, direction: str
) -> None:
    model = load_text_model(resolve_model(MODEL))
    tokenizer = Pipeline(tmp_path, model)
    await tokenizer.start()
    detokenizer = RpcServer("pando.v1.Detokenizer", f"unix:{tmp_path}/detokenizer.sock")
    servicer = DetokenizerService(Hub(DecoderFactory(model)))
    detokenizer.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, servicer)
    await detokenizer.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(FLIPS):
                tasks.create_task(survive(number, direction, tmp_path, tokenizer.address, detokenizer.address))
    finally:
        await tokenizer.stop()
        await detokenizer.stop(0)
