"""Recordings of what a rank computes: one at a time, limited, readable."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from protos.gen.pando.v1 import worker_pb2
from services.worker.profiles import ProfileRefusedError, ProfileRules, Profiles
from tests.fakes.engine import ScriptedEngine
from tests.services.worker.test_service import DECODE, OPEN, configure, execute

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.services.worker.conftest import Serve


class NotingRecorder:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def write(self, path: Path) -> None:
        self.calls.append("write")
        path.write_bytes(b"x" * 1000)

    def span(self, name: str) -> AbstractContextManager[object]:
        self.calls.append(name)
        return nullcontext()


class Desk:
    """Profiles that run on no thread of their own."""

    def __init__(self, rules: ProfileRules) -> None:
        self.recorders: list[NotingRecorder] = []
        self.profiles = Profiles(rules, self._make, self._run)

    def _make(self) -> NotingRecorder:
        self.recorders.append(NotingRecorder())
        return self.recorders[-1]

    @staticmethod
    async def _run(command: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        command()


async def test_one_recording_runs_at_a_time_and_each_is_written_to_a_separate_file(tmp_path: Path) -> None:
    desk = Desk(ProfileRules(tmp_path))
    with pytest.raises(ProfileRefusedError, match="start one first"):
        await desk.profiles.stop()
    first = await desk.profiles.start("rank0")
    with pytest.raises(ProfileRefusedError, match="already"):
        await desk.profiles.start("rank0")
    desk.profiles.note_pass()
    written = await desk.profiles.stop()
    assert (written.path, written.passes, written.bytes) == (first.path, 1, 1000)
    second = await desk.profiles.start("rank0")
    assert second.path != first.path
    await desk.profiles.stop()
    assert [recorder.calls for recorder in desk.recorders] == [["start", "stop", "write"]] * 2
    with pytest.raises(ProfileRefusedError, match="start one first"):
        await desk.profiles.stop()


@pytest.mark.parametrize("limit", ["seconds", "passes"])
async def test_a_recording_ends_by_itself_and_can_still_be_asked_for(tmp_path: Path, limit: str) -> None:
    rules = ProfileRules(tmp_path, max_seconds=0.05 if limit == "seconds" else 60, max_passes=3)
    desk = Desk(rules)
    started = await desk.profiles.start("rank0", max_seconds=1000)
    assert started.max_seconds == rules.max_seconds
    for _ in range(3 if limit == "passes" else 0):
        desk.profiles.note_pass()
    async with asyncio.timeout(30):
        while not started.path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ended = await desk.profiles.stop()
    assert ended.path == started.path
    assert ended.passes == (3 if limit == "passes" else 0)
    assert desk.profiles.span("anything").__enter__() is None
    await desk.profiles.start("rank0")


async def test_no_recording_begins_without_a_directory_or_room_in_it(tmp_path: Path) -> None:
    with pytest.raises(ProfileRefusedError, match=r"worker\.profile\.directory"):
        await Desk(ProfileRules()).profiles.start("rank0")
    desk = Desk(ProfileRules(tmp_path / "traces", max_bytes=1500))
    for _ in range(2):
        await desk.profiles.start("rank0")
        await desk.profiles.stop()
    with pytest.raises(ProfileRefusedError, match="remove some"):
        await desk.profiles.start("rank0")


async def test_a_recorder_that_cannot_begin_leaves_room_for_the_next(tmp_path: Path) -> None:
    desk = Desk(ProfileRules(tmp_path))
    make, desk.profiles._make_recorder = desk.profiles._make_recorder, lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        await desk.profiles.start("rank0")
    desk.profiles._make_recorder = make
    await desk.profiles.start("rank0")


async def test_a_trace_shows_the_plans_that_ran(serve: Serve, tmp_path: Path) -> None:
    stub = await serve(ScriptedEngine(), profile_rules=ProfileRules(tmp_path / "traces"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=60)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    started = await stub.StartProfile(worker_pb2.StartProfileRequest(max_seconds=30), timeout=30)
    assert started.max_seconds == 30
    with pytest.raises(grpc.aio.AioRpcError, match="recorded already"):
        await stub.StartProfile(worker_pb2.StartProfileRequest(), timeout=60)
    results = await execute(call, DECODE)
    ended = await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=30)
    assert (ended.path, ended.passes) == (started.path, len(results))
    assert "plan 2" in names(ended.path)
    assert "plan 1" not in names(ended.path)
    # And plans go on.
    assert len(await execute(call, DECODE)) == len(results)


def names(path: str) -> set[Any]:
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}
