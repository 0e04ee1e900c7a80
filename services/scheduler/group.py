"""The worker group: all tensor-parallel ranks, configured together and sent the same plans."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc

from common.errors import ConfigurationError, UnavailableError
from common.logs import get_logger
from common.rpc.reconnect import RefusalLog
from common.rpc.status import to_error
from common.wire.grammars import grammar_to_wire
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.acknowledgements import GroupAcks
from services.scheduler.wire.steps import capacity_from_wire, plan_to_wire, result_from_wire, spec_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from common.grammars import Grammar
    from common.steps import EngineCapacity, EngineSpec, StepPlan, StepResult
    from common.transfers import TransferAck

RECONNECT_S = 0.2
# A failure during loading is likely to repeat: pauses double up to this limit.
MAX_RECONNECT_S = 5.0
CONFIGURE_TIMEOUT_S = 3600.0
WATCH_INTERVAL_S = 1.0
# Time to wait for the other ranks' errors after one has failed.
REASON_GRACE_S = 0.5
# Covers the worker's own limit for a grammar, and grammars queued before this one.
PREPARE_TIMEOUT_S = 120.0


class GroupState(Enum):
    """State of a group; FAILED lasts until the ranks answer again."""

    CONNECTING = "CONNECTING"
    CONFIGURING = "CONFIGURING"
    READY = "READY"
    FAILED = "FAILED"


class GroupLostError(Exception):
    """A rank failed, disconnected or hangs; the whole group has to be configured again.

    `out_of_memory`: device memory did not suffice for a step.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class GroupListener(Protocol):
    """Receives the group's events. The calls run on the event loop."""

    def on_ready(self, capacity: EngineCapacity) -> None:
        """All ranks are ready for plans; their rows and KV are empty."""

    def on_result(self, result: StepResult) -> None:
        """Rank 0 has reported a forward pass."""

    def on_transfer(self, ack: TransferAck) -> None:
        """All ranks have finished a transfer."""

    def on_lost(self, *, out_of_memory: bool) -> None:
        """The group is lost with all rows and all KV; `out_of_memory`: its last steps were too large."""


class WorkerGroup:
    """Keeps the ranks configured and their Execute streams open; reconfigures all of them if one breaks."""

    def __init__(
        self,
        channels: Sequence[Callable[[], grpc.aio.Channel]],
        spec: EngineSpec,
        listener: GroupListener,
        timeout_s: float,
    ) -> None:
        """Prepare a group; `channels` open the ranks' channels, and each rank's number is set in its `spec`."""
        self.state = GroupState.CONNECTING
        self._open_channels = channels
        self._spec = spec
        self._listener = listener
        self._timeout_s = timeout_s
        self._queues: list[asyncio.Queue[worker_pb2.StepPlan]] = []
        self._acks = GroupAcks(len(channels))
        self._plans_in_flight = 0
        # One rank has failed, and the others' streams are read only for their errors.
        self._is_losing = False
        self._last_sign = time.monotonic()
        # Stub of rank 0, which samples, while the group is ready.
        self._first: worker_pb2_grpc.WorkerAsyncStub | None = None
        self._pause_s = RECONNECT_S
        self._refusals = RefusalLog("worker")
        self._log = get_logger("group")

    def send(self, plan: StepPlan) -> None:
        """Queue a plan for every rank."""
        assert self.state is GroupState.READY, "plans need a group that is ready"
        message = plan_to_wire(plan)
        if not self._plans_in_flight:
            self._last_sign = time.monotonic()
        self._plans_in_flight += 1
        for queue in self._queues:
            queue.put_nowait(message)

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar before rows need it.

        Raises:
            PandoError: the grammar is refused, or the workers are not connected.
        """
        if self._first is None:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        request = worker_pb2.PrepareGrammarRequest(grammar=grammar_to_wire(grammar))
        try:
            await self._first.PrepareGrammar(request, timeout=PREPARE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error

    async def run(self) -> NoReturn:
        """Configure and serve the group indefinitely.

        Raises:
            ConfigurationError: a rank rejects its configuration, so a retry would fail again.
        """
        while True:
            channels = [open_channel() for open_channel in self._open_channels]
            try:
                await self._run_once([worker_pb2_grpc.WorkerStub(channel) for channel in channels])
            except (GroupLostError, grpc.aio.AioRpcError) as error:
                self._lose(error)
            finally:
                for channel in channels:
                    await channel.close()
            await asyncio.sleep(self._pause_s)

    def _lose(self, error: Exception) -> None:
        if isinstance(error, grpc.RpcError):
            self._refusals.note(error)
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self.state in (GroupState.CONFIGURING, GroupState.READY):
            self._log.warning("group.lost", reason=reason)
        if self.state is GroupState.READY:
            self.state = GroupState.FAILED
            self._listener.on_lost(out_of_memory=isinstance(error, GroupLostError) and error.out_of_memory)
        elif self.state is GroupState.CONFIGURING:
            self.state = GroupState.CONNECTING
            self._pause_s = min(2 * self._pause_s, MAX_RECONNECT_S)

    async def _run_once(self, ranks: list[worker_pb2_grpc.WorkerAsyncStub]) -> None:
        """Configure all ranks, then serve them until one fails."""
        await asyncio.gather(
            *(rank.GetState(worker_pb2.GetWorkerStateRequest(), timeout=5, wait_for_ready=True) for rank in ranks)
        )
        if self.state is not GroupState.FAILED:
            self.state = GroupState.CONFIGURING
        capacity = await self._configure(ranks)
        self._queues = [asyncio.Queue() for _ in ranks]
        self._acks = GroupAcks(len(ranks))
        self._plans_in_flight = 0
        self._is_losing = False
        calls = [rank.Execute(_drain(queue)) for rank, queue in zip(ranks, self._queues, strict=True)]
        try:
            await asyncio.gather(*(call.wait_for_connection() for call in calls))
            self.state, self._pause_s = GroupState.READY, RECONNECT_S
            self._refusals.clear()
            self._first = ranks[0]
            self._log.info("group.ready", ranks=len(ranks), pages=capacity.device_pages, device=capacity.device)
            self._listener.on_ready(capacity)
            await self._serve(calls)
        finally:
            self._first = None
            for call in calls:
                call.cancel()

    async def _configure(self, ranks: list[worker_pb2_grpc.WorkerAsyncStub]) -> EngineCapacity:
        """Configure all ranks concurrently, as they synchronise; return the capacity that they agreed on."""
        tasks = [
            asyncio.create_task(self._configure_rank(rank, replace(self._spec, rank=number, world_size=len(ranks))))
            for number, rank in enumerate(ranks)
        ]
        try:
            capacities = await asyncio.gather(*tasks)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConfigurationError(f"worker: {error.details()}") from error
            raise
        finally:
            for task in tasks:
                task.cancel()
        # A page is stored by all ranks or not at all.
        has_storage = all(capacity.has_storage for capacity in capacities)
        # After a restart the group needs the same number of pages: waiting requests were admitted by this capacity.
        first = capacities[0]
        self._spec = replace(
            self._spec,
            device_pages=first.device_pages,
            host_pages=first.host_pages,
            window_pages=first.window_pool.pages if first.window_pool else None,
        )
        return replace(capacities[0], has_storage=has_storage)

    async def _configure_rank(self, rank: worker_pb2_grpc.WorkerAsyncStub, spec: EngineSpec) -> EngineCapacity:
        call = rank.Configure(spec_to_wire(spec), timeout=CONFIGURE_TIMEOUT_S)
        stage = ""
        async for message in call:
            if message.HasField("capacity"):
                return capacity_from_wire(message.capacity)
            if message.stage != stage:
                stage = message.stage
                self._log.info("worker.configuring", rank=spec.rank, stage=stage, percent=int(message.progress * 100))
        raise GroupLostError(f"rank {spec.rank} ended Configure without a capacity")

    async def _serve(self, calls: list[grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]]) -> None:
        """Read all ranks' results until one of them fails."""
        readers = [asyncio.create_task(self._read(call, rank)) for rank, call in enumerate(calls)]
        watch = asyncio.create_task(self._watch())
        try:
            done, _ = await asyncio.wait([*readers, watch], return_when=asyncio.FIRST_COMPLETED)
            self._is_losing = True
            if len(readers) > 1:
                # A failing rank makes others fail, and their errors may arrive first; only its own error has the cause.
                done = (await asyncio.wait(readers, timeout=REASON_GRACE_S))[0] | done
            raise _most_informative([error for task in done if (error := task.exception()) is not None])
        finally:
            for task in (*readers, watch):
                task.cancel()
            await asyncio.gather(*readers, watch, return_exceptions=True)

    async def _read(
        self, call: grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult], rank: int
    ) -> None:
        async for message in call:
            result = result_from_wire(message)
            if result.error is not None:
                raise GroupLostError(f"rank {rank}: {result.error}", out_of_memory=result.out_of_memory)
            if self._is_losing:
                continue
            for ack in result.acks:
                together = self._acks.add(rank, ack)
                if together is not None:
                    self._listener.on_transfer(together)
            if rank == 0:
                self._last_sign = time.monotonic()
                self._plans_in_flight -= result.last
                self._listener.on_result(result)
        raise GroupLostError(f"rank {rank} closed its stream")

    async def _watch(self) -> None:
        """Fail the group if plans are in flight and no result arrives in time."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            silence = time.monotonic() - self._last_sign
            if self._plans_in_flight and silence > self._timeout_s:
                raise GroupLostError(f"no result for {silence:.0f} s")


def _most_informative(errors: list[BaseException]) -> BaseException:
    """Return the root cause among the errors of several ranks."""
    return next((error for error in errors if isinstance(error, GroupLostError) and error.out_of_memory), errors[0])


async def _drain(queue: asyncio.Queue[worker_pb2.StepPlan]) -> AsyncIterator[worker_pb2.StepPlan]:
    while True:
        yield await queue.get()
