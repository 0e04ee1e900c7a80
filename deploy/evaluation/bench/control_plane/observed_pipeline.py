"""Measurements of a deployment from outside: CPU time and memory of processes, the scheduler's state and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from common.rpc.channel import open_channel
from deploy.evaluation.bench.transport import HttpClient
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from deploy.evaluation.bench.deployments import LaunchedDeployment

CALL_TIMEOUT_S = 10.0
WAIT_TIMEOUT_S = 60.0


class PipelineStateError(Exception):
    """The deployment did not reach the state that a measurement needs."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of the scheduler since its start."""

    handling_s: float
    """Its own time for steps: planning, encoding, processing results, pushing tokens."""
    passes: float
    """Forward passes."""
    compute_s: float
    """The worker's time for the forward passes."""


class ObservedPipeline:
    """Measures a running deployment; use it as an async context manager."""

    def __init__(self, deployment: LaunchedDeployment) -> None:
        """Observe `deployment`, whose scheduler must export metrics."""
        self.deployment = deployment
        self.url = deployment.url
        self._processes = {name: psutil.Process(pid) for name, pid in deployment.process_ids.items()}
        self._metrics_port = deployment.settings.scheduler.metrics_port

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.deployment.address_of("scheduler"))
        self._scheduler = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._http = HttpClient(f"http://127.0.0.1:{self._metrics_port}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()
        await self._channel.close()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of each service since its start."""
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: time.user + time.system for name, time in times.items()}

    def memory_bytes(self) -> dict[str, int]:
        """Return the unshared memory (USS) of each service; shared pages are mostly code of libraries."""
        return {name: int(process.memory_full_info().uss) for name, process in self._processes.items()}

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """Return the scheduler's state."""
        return await self._scheduler.GetState(scheduler_pb2.GetStateRequest(), timeout=CALL_TIMEOUT_S)

    async def pause(self) -> None:
        """Stop the admission of waiting requests."""
        await self._scheduler.Pause(scheduler_pb2.PauseRequest(), timeout=CALL_TIMEOUT_S)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._scheduler.Resume(scheduler_pb2.ResumeRequest(), timeout=CALL_TIMEOUT_S)

    async def wait_for(
        self, what: str, holds: Callable[[scheduler_pb2.GetStateResponse], bool], interval_s: float = 0.02
    ) -> None:
        """Poll the scheduler's state until `holds`.

        Raises:
            PipelineStateError: it does not within a minute; the message contains `what`.
        """
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while not holds(await self.state()):  # noqa: ASYNC110  (the state lives in another process)
                    await asyncio.sleep(interval_s)
        except TimeoutError:
            raise PipelineStateError(f"timed out while waiting for {what}") from None

    async def step_totals(self) -> StepTotals:
        """Return the totals of steps from the scheduler's metrics."""
        response = await self._http.request("GET", "/metrics", timeout_s=CALL_TIMEOUT_S)
        return parse_step_totals(response.body.decode())


def parse_step_totals(text: str) -> StepTotals:
    """Parse the scheduler's totals from Prometheus' text format.

    Raises:
        PipelineStateError: a metric is missing.
    """
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    try:
        return StepTotals(
            samples["pando_scheduler_step_cpu_seconds_sum"],
            samples["pando_scheduler_step_compute_seconds_count"],
            samples["pando_scheduler_step_compute_seconds_sum"],
        )
    except KeyError as error:
        raise PipelineStateError(f"the scheduler does not export {error}") from None
