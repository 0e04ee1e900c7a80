"""Adapters that a worker reads over gRPC: those that callers wait for are kept, and need their files only once."""

from __future__ import annotations

import asyncio
import shutil
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from common.steps import EngineSpec
from protos.gen.pando.v1 import common_pb2, worker_pb2
from services.scheduler.wire.steps import spec_to_wire
from services.worker.engine.execution.fake_model import FakeAdapters, fake_engine
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from protos.gen.pando.v1 import worker_pb2_grpc
    from services.worker.engine.execution.fake_model import FakeAdapter
    from tests.services.worker.conftest import Serve

SPEC = EngineSpec("anything", "fake", max_rows=4, adapter_slots=2)


@pytest.fixture
async def stub(serve: Serve) -> worker_pb2_grpc.WorkerAsyncStub:
    made = await serve(fake_engine())
    assert [message async for message in made.Configure(spec_to_wire(SPEC), timeout=60)]
    return made


def make_adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(directory.name)
    return directory


def read(
    stub: worker_pb2_grpc.WorkerAsyncStub, directory: Path, digest: str = ""
) -> Awaitable[worker_pb2.ReadAdapterResponse]:
    adapter = common_pb2.AdapterInfo(name="one", source=str(directory), digest=digest)
    return stub.ReadAdapter(worker_pb2.ReadAdapterRequest(adapter=adapter), timeout=30)


async def state(stub: worker_pb2_grpc.WorkerAsyncStub) -> tuple[list[str], list[str]]:
    """Return the names and the digests that the worker has."""
    answer = await stub.GetAdapters(worker_pb2.GetAdaptersRequest(), timeout=30)
    return [each.name for each in answer.adapters], [*answer.digests]


async def test_names_are_those_that_were_set_and_memory_is_freed_by_digests(
    stub: worker_pb2_grpc.WorkerAsyncStub, tmp_path: Path
) -> None:
    first = (await read(stub, make_adapter(tmp_path / "first"))).adapter
    second = (await read(stub, make_adapter(tmp_path / "second"))).adapter
    assert await state(stub) == ([], [first.digest, second.digest])
    await stub.SetAdapters(worker_pb2.SetAdaptersRequest(adapters=[first]), timeout=30)
    await stub.DropAdapter(worker_pb2.DropAdapterRequest(digest=second.digest), timeout=30)
    assert await state(stub) == (["one"], [first.digest])
    await stub.SetAdapters(worker_pb2.SetAdaptersRequest(), timeout=30)
    assert await state(stub) == ([], [first.digest])


async def test_files_of_an_adapter_in_memory_may_be_gone(stub: worker_pb2_grpc.WorkerAsyncStub, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter")
    digest = (await read(stub, directory)).adapter.digest
    shutil.rmtree(directory)
    assert (await read(stub, directory, digest)).adapter.digest == digest
    await stub.DropAdapter(worker_pb2.DropAdapterRequest(digest=digest), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub, directory, digest)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_adapter_whose_caller_has_gone_is_not_kept(
    stub: worker_pb2_grpc.WorkerAsyncStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    ended: list[FakeAdapter] = []
    inner = FakeAdapters.read

    def slow(self: FakeAdapters, directory: Path, expected: str = "") -> FakeAdapter:
        has_begun.set()
        assert may_end.wait(30)
        ended.append(inner(self, directory, expected))
        return ended[-1]

    monkeypatch.setattr(FakeAdapters, "read", slow)
    directory = make_adapter(tmp_path / "adapter")
    reading = asyncio.ensure_future(read(stub, directory))
    await until(has_begun.is_set)
    reading.cancel()
    # The server hears of it before it answers a later call.
    assert await state(stub) == ([], [])
    may_end.set()
    await until(lambda: ended)
    assert await state(stub) == ([], [])
    # Another caller that waits has it.
    assert (await read(stub, directory)).adapter.digest == ended[0].digest
    assert await state(stub) == ([], [ended[0].digest])
