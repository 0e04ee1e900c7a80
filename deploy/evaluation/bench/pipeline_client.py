"""Client of scheduler and detokenizer: submits token ids like a tokenizer, receives text like a gateway."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc
import numpy as np

from common.rpc.channel import open_channel
from common.rpc.status import describe
from common.rpc.stream import wait_until_accepted
from common.types import (
    CacheMode,
    FinishReason,
    ReplyTo,
    RequestId,
    RequestOptions,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from common.wire.answers import admission_from_wire, finish_from_wire
from common.wire.requests import schedule_request_to_wire
from deploy.evaluation.bench.clock import Clock, SystemClock
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from common.types import Finish
    from deploy.evaluation.bench.prompts import PromptMaker
    from deploy.evaluation.bench.records import BenchRequest

# Requests and responses differ by stream.
AnyStream: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]"

CONNECT_TIMEOUT_S = 30.0
TENANT = "bench"


class PipelineError(Exception):
    """A service is unreachable or a stream broke; the message names it."""


@dataclass(slots=True)
class PipelineRecord:
    """The record of one request. Times are in seconds of the client's clock."""

    request_id: RequestId
    submitted_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    # When tokens arrived, several at a time counted once.
    arrivals_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    failure: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the request has not finished yet."""
        return self.finish is None and self.failure is None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate after the first token; None if the output is too short."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)


@dataclass(slots=True)
class _Batch:
    """The requests of one `run`, by id."""

    records: dict[str, PipelineRecord] = field(default_factory=dict)
    open_count: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.open_count -= 1
        if self.open_count == 0:
            self.done.set()


class PipelineClient:
    """One subscription and one submission stream; use it as an async context manager."""

    def __init__(self, scheduler: str, detokenizer: str, clock: Clock | None = None) -> None:
        """Prepare for the services at these gRPC addresses."""
        self.subscriber_id = SubscriberId(f"bench-{uuid.uuid4()}")
        self._addresses = {"scheduler": scheduler, "detokenizer": detokenizer}
        self._clock = clock or SystemClock()
        self._batch = _Batch()
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []
        self._broken: str | None = None

    async def __aenter__(self) -> Self:
        """Open both streams.

        Raises:
            PipelineError: a service is unreachable.
        """
        channels = {name: open_channel(address) for name, address in self._addresses.items()}
        self._channels = list(channels.values())
        self._scheduler = scheduler_pb2_grpc.SchedulerStub(channels["scheduler"])
        detokenizer = detokenizer_pb2_grpc.DetokenizerStub(channels["detokenizer"])
        subscription = detokenizer.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id=self.subscriber_id))
        self._submission = self._scheduler.Submit()
        try:
            for name, call in (("detokenizer", subscription), ("scheduler", self._submission)):
                await self._wait_for(name, call)
        except PipelineError:
            await self._close()
            raise
        self._tasks = [
            asyncio.create_task(self._follow("detokenizer", subscription, self._on_deltas)),
            asyncio.create_task(self._follow("scheduler", self._submission, self._on_admissions)),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close both streams; open requests are aborted, as their subscriber is gone."""
        await self._close()

    async def start(self, requests: Sequence[ScheduleRequest]) -> list[PipelineRecord]:
        """Submit `requests` as one batch and return their records, which `finish` completes."""
        now = self._clock.now()
        records = [PipelineRecord(r.request_id, now, prompt_tokens=len(r.token_ids)) for r in requests]
        self._batch = _Batch({record.request_id: record for record in records}, len(records))
        reply_to = ReplyTo(self.subscriber_id)
        encoded = [schedule_request_to_wire(replace(request, reply_to=reply_to)) for request in requests]
        await self._submission.write(scheduler_pb2.SchedulerSubmitRequest(schedules=encoded))
        return records

    async def finish(self, timeout_s: float) -> None:
        """Wait until every request of the batch has ended.

        Raises:
            PipelineError: a stream broke, or the timeout expired.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._batch.done.wait()
        except TimeoutError:
            raise PipelineError(f"{self._batch.open_count} requests had not finished after {timeout_s:g} s") from None
        if self._broken is not None:
            raise PipelineError(self._broken)

    async def run(self, requests: Sequence[ScheduleRequest], timeout_s: float = 3600.0) -> list[PipelineRecord]:
        """Submit `requests` as one batch and wait until all have ended."""
        records = await self.start(requests)
        await self.finish(timeout_s)
        return records

    async def get_state(self) -> scheduler_pb2.GetStateResponse:
        """Return the scheduler's state."""
        return await self._scheduler.GetState(scheduler_pb2.GetStateRequest(), timeout=10)

    async def _wait_for(self, name: str, call: AnyStream) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await wait_until_accepted(call)
        except TimeoutError:
            raise PipelineError(f"the {name} at {self._addresses[name]} does not answer") from None
        except grpc.RpcError as error:
            raise PipelineError(f"the {name} at {self._addresses[name]} is unreachable: {describe(error)}") from None

    async def _follow(self, name: str, call: AnyStream, on_message: Callable[[Any], None]) -> None:
        """Read a stream until it breaks; open requests cannot finish after that."""
        reason = "closed by the peer"
        try:
            async for message in call:
                on_message(message)
        except grpc.RpcError as error:
            reason = describe(error)
        self._broken = f"the stream of the {name} broke: {reason}"
        self._batch.done.set()

    def _on_admissions(self, message: scheduler_pb2.SchedulerSubmitResponse) -> None:
        for encoded in message.admissions:
            admission = admission_from_wire(encoded)
            record = self._batch.records.get(admission.request_id)
            if admission.rejected is not None and record is not None and record.is_open:
                record.failure = f"{admission.rejected.code.value}: {admission.rejected.message}"
                self._batch.end()

    def _on_deltas(self, message: detokenizer_pb2.SubscribeResponse) -> None:
        now = self._clock.now()
        for delta in message.deltas:
            record = self._batch.records.get(delta.request_id)
            if record is None or not record.is_open:
                continue
            if delta.token_ids:
                record.tokens += len(delta.token_ids)
                record.last_s = now
                record.arrivals_s.append(now)
                record.first_s = record.first_s or now
            if delta.HasField("prompt_usage"):
                record.cached_tokens = delta.prompt_usage.cached_tokens
            if delta.HasField("finish"):
                record.finish = finish_from_wire(delta.finish)
                if record.finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
                    error = record.finish.error
                    record.failure = error.message if error else record.finish.reason.value
                self._batch.end()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


def schedule_requests(
    requests: Sequence[BenchRequest], prompts: PromptMaker, temperature: float, cache_mode: CacheMode
) -> list[ScheduleRequest]:
    """Return `requests` for the scheduler; those without a user get distinct subjects and cannot share prefixes."""
    run = uuid.uuid4().hex
    return [
        ScheduleRequest(
            request_id=RequestId(f"bench-{run}-{index}"),
            view=View(Subject(TENANT, request.user or f"{run}-{index}")),
            reply_to=ReplyTo(SubscriberId("")),
            token_ids=np.asarray(prompts.prompt(request.segments), dtype=np.int32),
            options=RequestOptions(
                SamplingParams(temperature=temperature, seed=index),
                StopConditions(max_tokens=request.output_tokens, ignore_eos=True),
                cache_mode=cache_mode,
            ),
        )
        for index, request in enumerate(requests)
    ]
