"""Scheduler and detokenizer in one: every request is answered at once, two tokens a message."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from common.rpc.stream import accept_stream
from common.types import ErrorCode, Finish, FinishReason, RequestFailure
from common.wire.answers import failure_to_wire, finish_to_wire
from protos.gen.pando.v1 import (
    common_pb2,
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CACHED_TOKENS = 3


@dataclass
class EchoPipeline(scheduler_pb2_grpc.SchedulerServicer, detokenizer_pb2_grpc.DetokenizerServicer):
    """`mode` is what becomes of requests: finish, reject, fail, short (a token too few) or hang."""

    mode: str = "finish"
    address: str = ""
    requests: list[scheduler_pb2.ScheduleRequest] = field(default_factory=list)
    mailboxes: dict[str, asyncio.Queue[detokenizer_pb2.SubscribeResponse | None]] = field(default_factory=dict)

    async def Subscribe(
        self,
        request: detokenizer_pb2.SubscribeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[detokenizer_pb2.SubscribeResponse]:
        mailbox = self.mailboxes.setdefault(request.subscriber_id, asyncio.Queue())
        await accept_stream(context)
        while (message := await mailbox.get()) is not None:
            yield message

    async def Submit(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.SchedulerSubmitResponse]:
        await accept_stream(context)
        async for message in request_iterator:
            admissions = []
            for schedule in message.schedules:
                self.requests.append(schedule)
                admissions.append(self._admit(schedule))
            yield scheduler_pb2.SchedulerSubmitResponse(admissions=admissions)

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.GetStateResponse:
        return scheduler_pb2.GetStateResponse(running_rows=7)

    def break_streams(self) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.put_nowait(None)

    def _admit(self, schedule: scheduler_pb2.ScheduleRequest) -> common_pb2.Admission:
        failure = failure_to_wire(RequestFailure(ErrorCode.QUEUE_FULL, "too many"))
        if self.mode == "reject":
            return common_pb2.Admission(request_id=schedule.request_id, rejected=failure)
        if self.mode != "hang":
            self._answer(schedule)
        return common_pb2.Admission(request_id=schedule.request_id, prompt_tokens=len(schedule.token_ids))

    def _answer(self, schedule: scheduler_pb2.ScheduleRequest) -> None:
        mailbox = self.mailboxes[schedule.reply_to.subscriber_id]
        tokens = schedule.stop.max_tokens - (self.mode == "short")
        usage = detokenizer_pb2.PromptUsage(prompt_tokens=len(schedule.token_ids), cached_tokens=CACHED_TOKENS)
        for first in range(0, tokens, 2):
            delta = detokenizer_pb2.Delta(
                request_id=schedule.request_id,
                first_token_index=first,
                token_ids=[1] * min(2, tokens - first),
                prompt_usage=usage if first == 0 else None,
            )
            mailbox.put_nowait(detokenizer_pb2.SubscribeResponse(deltas=[delta]))
        failure = RequestFailure(ErrorCode.TIMEOUT, "took too long")
        finish = Finish(FinishReason.ERROR, error=failure) if self.mode == "fail" else Finish(FinishReason.LENGTH)
        last = detokenizer_pb2.Delta(request_id=schedule.request_id, finish=finish_to_wire(finish))
        mailbox.put_nowait(detokenizer_pb2.SubscribeResponse(deltas=[last]))


@asynccontextmanager
async def running_pipeline(mode: str = "finish") -> AsyncIterator[EchoPipeline]:
    """Serve on a socket of its own."""
    pipeline = EchoPipeline(mode)  # type: ignore[abstract]  # the other calls answer UNIMPLEMENTED
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(pipeline, server)
    detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(pipeline, server)
    with tempfile.TemporaryDirectory() as directory:
        pipeline.address = f"unix:{directory}/pipeline.sock"
        server.add_insecure_port(pipeline.address)
        await server.start()
        try:
            yield pipeline
        finally:
            await server.stop(grace=0)
