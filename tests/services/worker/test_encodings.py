"""The calls of a worker that encodes images for others, and of a rank that reads what it has encoded."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from common.errors import InvalidRequestError, UnavailableError
from common.types import EncoderOutputId, RowImage
from protos.gen.pando.v1 import worker_pb2
from services.scheduler.wire.steps import write_image
from services.worker.rank import NotReadyError, Rank
from tests.fakes.engine import ScriptedEngine, nothing
from tests.services.worker.test_service import OPEN, SPEC, configure, execute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from common.steps import StepPlan
    from services.worker.engine.plans.rows import RowStates
    from tests.services.worker.conftest import Serve

TICKET = b"t" * 16


class Store:
    """Keeps outputs."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}

    def admit(self, plan: StepPlan, rows: RowStates) -> StepPlan:
        return plan

    def keep(self, output: EncoderOutputId, content: memoryview) -> None:
        self.kept[output] = bytes(content)

    def reset(self) -> None:
        self.kept.clear()


class Doubling:
    """Encodes pixels as twice their values; there must be as many as the image has embeddings."""

    def __init__(self, before: Callable[[], None] = nothing) -> None:
        self.before = before

    def encode(self, images: Sequence[RowImage]) -> list[memoryview]:
        self.before()
        if any(isinstance(each.pixels, np.ndarray) and each.pixels.size != each.length for each in images):
            raise InvalidRequestError("no image", param="image")
        return [memoryview((2 * each.pixels).tobytes()) for each in images if isinstance(each.pixels, np.ndarray)]


def asked(*pixels: float, length: int | None = None) -> worker_pb2.EncodeRequest:
    image = RowImage(b"", 0, length or len(pixels), (1, 1), np.array(pixels, np.float32))
    request = worker_pb2.EncodeRequest(ticket=TICKET)
    write_image(image, request.image)
    return request


async def test_an_image_is_encoded_and_kept_as_an_output_while_its_call_is_open(serve: Serve, tmp_path: Path) -> None:
    store = Store()
    stub = await serve(ScriptedEngine(images=store, encoder=Doubling()))
    await configure(stub)
    plans = stub.Execute()
    await execute(plans, OPEN)
    call = stub.Encode(asked(1.0, 2.5))
    assert await call.read() == worker_pb2.EncodeResponse()
    fetch = worker_pb2.FetchEmbeddingsRequest(
        output=3, encoder=f"unix:{tmp_path}/worker.sock", ticket=TICKET, embeddings=2
    )
    await stub.FetchEmbeddings(fetch, timeout=60)
    assert store.kept == {3: np.array([2.0, 5.0], np.float32).tobytes()}
    fetch.output, fetch.embeddings = 4, 3
    with pytest.raises(grpc.aio.AioRpcError, match="12 were expected"):
        await stub.FetchEmbeddings(fetch, timeout=60)
    call.cancel()
    fetch.embeddings = 2
    async with asyncio.timeout(60):
        # The server learns of the end of a call a little later.
        while (code := await stub.FetchEmbeddings(fetch).code()) is grpc.StatusCode.OK:
            store.kept.pop(4)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert set(store.kept) == {3}
    plans.cancel()


async def test_what_is_no_image_and_what_encodes_nothing_is_refused(serve: Serve) -> None:
    engine = ScriptedEngine(encoder=Doubling())
    stub = await serve(engine)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Encode(asked(1.0)).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "it is not configured"
    await configure(stub)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Encode(asked(1.0, length=2)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    engine.encoder = None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Encode(asked(1.0)).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.FetchEmbeddings(worker_pb2.FetchEmbeddingsRequest(output=1, embeddings=1), timeout=60)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_image_is_encoded_by_the_expected_encoder_only(serve: Serve) -> None:
    engine = ScriptedEngine(encoder=Doubling(), encoder_identity="old")
    stub = await serve(engine)
    await configure(stub)
    request = asked(1.0)
    request.encoder_identity = "old"
    call = stub.Encode(request)
    assert await call.read() == worker_pb2.EncodeResponse()
    call.cancel()
    # Another group replaces its weights first, while an image of this one is encoded.
    encoding, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        encoding.set()
        goes_on.wait(60)

    engine.encoder = Doubling(wait)
    request.ticket = b"u" * 16
    call = stub.Encode(request)
    reading = asyncio.create_task(call.read())
    assert await asyncio.to_thread(encoding.wait, 60)
    engine.encoder_identity = "new"
    configuring = asyncio.create_task(configure(stub))
    async with asyncio.timeout(60):
        while (await stub.GetState(worker_pb2.GetWorkerStateRequest())).state == "READY":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    goes_on.set()
    with pytest.raises(grpc.aio.AioRpcError, match="another encoder"):
        await reading
    await configuring
    with pytest.raises(grpc.aio.AioRpcError, match="another encoder"):
        await stub.Encode(request).read()
    request.encoder_identity = "new"
    assert await stub.Encode(request).read() == worker_pb2.EncodeResponse()


async def test_nothing_is_kept_for_a_stream_that_has_ended_meanwhile() -> None:
    store = Store()
    rank = Rank(ScriptedEngine(images=store))
    await rank.configure(SPEC, lambda _fraction, _stage: None)

    async def read(size: int) -> memoryview:
        started.set()
        await goes_on.wait()
        return memoryview(bytearray(size))

    with pytest.raises(NotReadyError):
        await rank.keep_embeddings(EncoderOutputId(1), 1, read)
    started, goes_on = asyncio.Event(), asyncio.Event()
    session = rank.open_session()
    keeping = asyncio.create_task(rank.keep_embeddings(EncoderOutputId(1), 1, read))
    await started.wait()
    rank.close_session(session)
    rank.open_session()
    goes_on.set()
    with pytest.raises(UnavailableError):
        await keeping
    assert not store.kept
    await rank.keep_embeddings(EncoderOutputId(2), 2, read)
    assert store.kept == {2: bytes(8)}
    assert await rank.stop()
