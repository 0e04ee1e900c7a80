"""A worker rank on a real gRPC server, with the simulated worker behind it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from common.steps import PageGrant, PageReplacement, PrefillChunk, RowOpen, StepPlan
from common.types import RequestId, RowSlot, StepId
from common.wire import finish_reason_to_wire, sampling_from_wire
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from tests.fakes.simulated_worker import VOCABULARY, SimulatedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.steps import StepResult

    Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorkerService(worker_pb2_grpc.WorkerServicer):
    """Configures at once and runs plans on a SimulatedWorker; tests set the attributes to make it misbehave."""

    def __init__(self, pages: int = 64, eos_token_id: int = 7) -> None:
        self.pages = pages
        self.eos_token_id = eos_token_id
        self.configured: list[worker_pb2.ConfigureRequest] = []
        self.plans: list[StepPlan] = []
        self.refusal: str | None = None
        self.fail_at_step: int | None = None
        self.hangs = False
        self.step_s = 0.0

    async def GetState(
        self, request: worker_pb2.GetWorkerStateRequest, context: Context
    ) -> worker_pb2.GetWorkerStateResponse:
        return worker_pb2.GetWorkerStateResponse(state="READY")

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureResponse]:
        self.configured.append(request)
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        yield worker_pb2.ConfigureResponse(progress=0.5, stage="loading")
        capacity = worker_pb2.WorkerCapacity(
            device_pages=self.pages,
            page_size_tokens=request.page_size_tokens,
            max_context_tokens=128,
            vocabulary_size=VOCABULARY,
            eos_token_ids=[self.eos_token_id],
            device="fake",
        )
        yield worker_pb2.ConfigureResponse(progress=1.0, capacity=capacity)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        worker = SimulatedWorker(self.pages, self.configured[-1].page_size_tokens)
        async for message in request_iterator:
            if self.hangs:
                await asyncio.Event().wait()
            plan = plan_from_wire(message)
            self.plans.append(plan)
            if self.fail_at_step is not None and plan.step_id >= self.fail_at_step:
                self.fail_at_step = None
                yield worker_pb2.StepResult(step_id=plan.step_id, last=True, error="out of luck")
                return
            for result in worker.run(plan):
                await asyncio.sleep(self.step_s)
                yield result_to_wire(result)


def plan_from_wire(message: worker_pb2.StepPlan) -> StepPlan:
    def ids(values: Any) -> Any:
        return np.array(values, np.int32)

    return StepPlan(
        step_id=StepId(message.step_id),
        epoch=message.epoch,
        closes=tuple(RowSlot(row) for row in message.closes),
        opens=tuple(
            RowOpen(
                row=RowSlot(opened.row),
                request_id=RequestId(opened.request_id),
                token_ids=ids(opened.token_ids),
                prompt_tokens=opened.prompt_tokens,
                computed_tokens=opened.computed_tokens,
                pages=ids(opened.pages),
                sampling=sampling_from_wire(opened.sampling),
                max_total_tokens=opened.max_total_tokens,
                stop_token_ids=tuple(opened.stop_token_ids),
                min_new_tokens=opened.min_new_tokens,
            )
            for opened in message.opens
        ),
        grants=tuple(PageGrant(RowSlot(grant.row), ids(grant.pages)) for grant in message.grants),
        prefills=tuple(PrefillChunk(RowSlot(chunk.row), chunk.start, chunk.length) for chunk in message.prefills),
        replacements=tuple(
            PageReplacement(RowSlot(change.row), change.first, ids(change.pages)) for change in message.replacements
        ),
        steps=message.steps,
    )


def result_to_wire(result: StepResult) -> worker_pb2.StepResult:
    stops = [
        worker_pb2.RowStop(
            row=stop.row, reason=finish_reason_to_wire(stop.reason), matched_token_id=stop.matched_token_id
        )
        for stop in result.stops
    ]
    return worker_pb2.StepResult(
        step_id=result.step_id,
        substep=result.substep,
        last=result.last,
        rows=result.rows.tolist(),
        token_ids=result.token_ids.tolist(),
        stops=stops,
        compute_us=result.compute_us,
    )
