"""Leases of a rank whose engine is still at work."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
import pytest

from common.steps import EngineSpec, RecurrentStates, StepPlan
from common.types import StepId
from protos.gen.pando.v1 import worker_pb2
from services.scheduler.wire.steps import plan_to_wire
from services.worker.engine.execution.fake_model import FakeDevicePages
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.parallel.shards import Span
from tests.fakes.engine import ScriptedEngine, wait_for
from tests.services.worker.test_service import OPEN, code_of, configure, execute

if TYPE_CHECKING:
    from common.steps import EngineCapacity
    from protos.gen.pando.v1 import worker_pb2_grpc
    from services.worker.engine.execution.interface import AfterPasses, ProgressReport
    from tests.services.worker.conftest import Serve

LEASE = b"0123456789abcdef"


class Saves:
    """Snapshots of one byte, which is the number of plans that the engine has carried out."""

    def __init__(self, plans: list[StepPlan]) -> None:
        self.form = PageForm(((1, 1),), Span(0, 1), 1)
        self._plans = plans

    def read(self, snapshot: int, heads: Span) -> bytes:
        return bytes([len(self._plans)])

    def write(self, snapshot: int, content: memoryview) -> None:
        raise AssertionError("nothing arrives")


class Device(FakeDevicePages):
    def __init__(self, plans: list[StepPlan], after: AfterPasses) -> None:
        super().__init__(1)
        self.snapshots = Saves(plans)
        self._after = after

    def after_passes(self) -> AfterPasses:
        return self._after


@dataclass
class StatefulEngine(ScriptedEngine):
    """Has recurrent layers; `is_over` is set once its passes are over on the device."""

    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def device_pages(self) -> Device:
        return Device(self.plans, lambda: wait_for(self.is_over)())

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        return replace(super().configure(spec, report), recurrent_states=RecurrentStates(4, 1))


async def read_snapshot(stub: worker_pb2_grpc.WorkerAsyncStub) -> bytes:
    request = worker_pb2.ReadSnapshotRequest(lease=LEASE, device_snapshot=1)
    return b"".join([part.content async for part in stub.ReadSnapshot(request, timeout=30)])


async def test_a_snapshot_is_granted_once_this_rank_has_saved_it(serve: Serve) -> None:
    may_go_on, has_begun = threading.Event(), threading.Event()
    engine = StatefulEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    # Another rank may be done with this plan, so that the scheduler takes the snapshot for saved.
    engine.before_execute = wait_for(may_go_on, has_begun)
    await call.write(plan_to_wire(StepPlan(StepId(2))))
    await asyncio.to_thread(has_begun.wait, 60)
    granting = stub.GrantPages(worker_pb2.GrantPagesRequest(lease=LEASE, device_snapshots=[1]), timeout=60)
    await stub.GrantPages(worker_pb2.GrantPagesRequest(lease=LEASE, device_pages=[1]), timeout=60)
    for hold in (may_go_on, engine.is_over):
        with pytest.raises(grpc.aio.AioRpcError, match="no lease of this snapshot"):
            await read_snapshot(stub)
        hold.set()
    await granting
    assert await read_snapshot(stub) == bytes([2])


async def test_no_snapshot_is_granted_after_the_stream_of_plans(serve: Serve) -> None:
    engine = StatefulEngine()
    stub = await serve(engine)
    await configure(stub)
    call = stub.Execute()
    await execute(call, OPEN)
    granting = stub.GrantPages(worker_pb2.GrantPagesRequest(lease=LEASE, device_snapshots=[1]), timeout=60)
    # The grant has come, as this has, too.
    await stub.GrantPages(worker_pb2.GrantPagesRequest(lease=LEASE, device_pages=[1]), timeout=60)
    newer = stub.Execute()
    await execute(newer, replace(OPEN, step_id=StepId(3)))
    engine.is_over.set()
    assert await code_of(granting) is grpc.StatusCode.FAILED_PRECONDITION
