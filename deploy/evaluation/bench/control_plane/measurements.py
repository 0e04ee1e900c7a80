"""The figures of `pando bench control-plane`, with their targets: cost per token, latencies, scheduler time, memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import CacheMode
from deploy.evaluation.bench.client import AnswerReader
from deploy.evaluation.bench.control_plane.observed_pipeline import PipelineStateError
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.pipeline_client import PipelineClient, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline
    from deploy.evaluation.bench.records import WorkloadSession
    from protos.gen.pando.v1 import scheduler_pb2

PIPELINE_PROMPT_TOKENS = 32
PIPELINE_OUTPUT_TOKENS = 256
STREAMS = 64
WAVES = 3
IDLE_PROMPT_TOKENS = 32
REQUESTS_PER_REPEAT = 30
TARGET_ADDED_MS = 6.0
TARGET_ABORT_MS = 100.0
ABORTS_PER_REPEAT = 5
CHUNKS_BEFORE_LEAVING = 5
FREED_POLL_S = 0.001
# About the duration of a step of an 8B model with this many rows on a GPU, and long enough for the other services,
# which share the processor, to finish the previous step.
STEP_MS = 10.0
STEP_PROMPT_TOKENS = 64
WINDOW_STEPS = 60
TARGET_US = 400.0
HELD_PROMPT_TOKENS = 256
# One-time allocations are included at every count, so the slope over the counts is the memory per request.
COUNTS = (128, 256, 384, 512, 640)
SETTLE_S = 0.5
TARGET_KIB = 64.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the control plane."""

    metric: str
    name: str
    spread: Spread
    unit: str
    target: float | None = None
    """Upper bound in the same unit; None: no target."""

    @classmethod
    def of(cls, metric: str, name: str, values: Sequence[float], unit: str, target: float | None = None) -> Figure:
        """Return the figure of repeated measurements."""
        return cls(metric, name, Spread.of(values), unit, target)

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target; None without a target."""
        return None if self.target is None else self.spread.median <= self.target


async def measure_pipeline(observed: ObservedPipeline, repeats: int) -> list[Figure]:
    """Stream at full speed; report tokens per second, and per second of processor time."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, prompt_form="ids"))
    rates: list[float] = []
    per_core: list[float] = []
    shares: dict[str, list[float]] = {}
    client: list[float] = []
    batching: list[float] = []
    try:
        await bench.warm_up(STREAMS, STREAMS, PIPELINE_PROMPT_TOKENS, 16)
        for repeat in range(repeats):
            sessions = random_sessions(
                STREAMS * WAVES, PIPELINE_PROMPT_TOKENS, PIPELINE_OUTPUT_TOKENS, name=f"pipeline/{repeat}"
            )
            before, client_before = observed.cpu_seconds(), time.process_time()
            result = await bench.closed_loop(sessions, STREAMS)
            after, client_after = observed.cpu_seconds(), time.process_time()
            if failed := [record for record in result.records if record.error is not None]:
                raise PipelineStateError(f"{len(failed)} requests failed, such as: {failed[0].message}")
            tokens = sum(record.output_tokens for record in result.records)
            rates.append(tokens / result.duration_s)
            per_core.append(tokens / (sum(after.values()) - sum(before.values())))
            batching.append(tokens / sum(len(record.chunks_s) for record in result.records))
            client.append((client_after - client_before) / tokens * 1e6)
            for name in after:
                shares.setdefault(name, []).append((after[name] - before[name]) / tokens * 1e6)
    finally:
        await bench.close()
    return [
        Figure.of("pipeline_output", f"gateway SSE, {STREAMS} streams, client on the same machine", rates, "tok/s"),
        Figure.of("pipeline_output_per_core", "tokens per second of processor time", per_core, "tok/s"),
        *(Figure.of(f"pipeline_{name}_cpu", f"… {name}, per token", values, "µs") for name, values in shares.items()),
        Figure.of(
            "pipeline_gateway_cpu_per_event",
            "… gateway, per server-sent event",
            [cost * tokens for cost, tokens in zip(shares["gateway"], batching, strict=True)],
            "µs",
        ),
        Figure.of(
            "pipeline_tokens_per_event",
            "tokens per event: the fake worker is faster than the pipeline",
            batching,
            "tokens",
        ),
        Figure.of("pipeline_client_cpu", "… (this client, per token)", client, "µs"),
    ]


async def measure_added_latency(observed: ObservedPipeline, repeats: int) -> list[Figure]:
    """Send one chat at a time and subtract the time of the worker's forward pass, by the worker's clock."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, endpoint="chat"))
    added: list[float] = []
    try:
        await bench.warm_up(5, 1, IDLE_PROMPT_TOKENS, 4)
        for repeat in range(repeats):
            sessions = random_sessions(REQUESTS_PER_REPEAT, IDLE_PROMPT_TOKENS, 4, name=f"latency/{repeat}")
            before = await observed.step_totals()
            result = await bench.closed_loop(sessions, 1)
            after = await observed.step_totals()
            step_s = (after.compute_s - before.compute_s) / (after.passes - before.passes)
            firsts = [first for record in result.records if (first := record.time_to_first_s) is not None]
            if len(firsts) < len(sessions):
                raise PipelineStateError("a request had no output")
            added += [(first - step_s) * 1000 for first in firsts]
    finally:
        await bench.close()
    return [Figure.of("added_ttft", "added to the first token by all hops, idle", added, "ms", TARGET_ADDED_MS)]


async def measure_abort_latency(observed: ObservedPipeline, repeats: int) -> list[Figure]:
    """Disconnect in the middle of an answer and poll until the scheduler has freed its row and pages."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, prompt_form="ids"))
    times: list[float] = []
    try:
        for number in range(repeats * ABORTS_PER_REPEAT):
            await observed.wait_for("an idle scheduler", is_idle)
            await _leave_midway(bench, number)
            left = bench.clock.now()
            await observed.wait_for("the pages of an aborted request", is_idle, FREED_POLL_S)
            times.append((bench.clock.now() - left) * 1000)
    finally:
        await bench.close()
    return [Figure.of("abort", "from disconnect to free pages", times, "ms", TARGET_ABORT_MS)]


def is_idle(state: scheduler_pb2.GetStateResponse) -> bool:
    """Whether no request runs or waits, and no page is protected."""
    held = sum(tier.protected_pages for tier in state.tiers)
    return not (state.running_rows or state.waiting_requests or held)


async def _leave_midway(bench: ServerUnderTest, number: int) -> None:
    """Read a few chunks of a long answer, then close the connection."""
    arrived = asyncio.Event()
    reader = AnswerReader(bench.clock.now)

    def read(piece: bytes) -> None:
        reader.feed(piece)
        if len(reader.chunks_s) >= CHUNKS_BEFORE_LEAVING:
            arrived.set()

    request = BenchRequest((Segment(f"abort/{number}", IDLE_PROMPT_TOKENS),), output_tokens=4000)
    asking = asyncio.create_task(bench.client.exchange(request, read))
    leaving = asyncio.create_task(arrived.wait())
    try:
        await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            raise PipelineStateError(f"an answer ended before it could be aborted: {asking.result()}")
    finally:
        asking.cancel()
        leaving.cancel()
        await asyncio.gather(asking, leaving, return_exceptions=True)


async def measure_scheduler_step(observed: ObservedPipeline, rows: int, repeats: int) -> list[Figure]:
    """Keep `rows` rows decoding and divide the scheduler's time by the number of steps, in `repeats` windows."""
    steps = WINDOW_STEPS * (repeats + 1) + 100
    requests = [session.requests[0] for session in random_sessions(rows, STEP_PROMPT_TOKENS, steps, name="step")]
    addresses = (observed.deployment.address_of("scheduler"), observed.deployment.address_of("detokenizer"))
    handling: list[float] = []
    process: list[float] = []
    async with PipelineClient(*addresses) as client:
        records = await client.start(schedule_requests(requests, PromptMaker(), 0.0, CacheMode.DEFAULT))
        await observed.wait_for("every row to decode", lambda _: all(record.tokens for record in records))
        for _ in range(repeats):
            before, cpu_before = await observed.step_totals(), observed.cpu_seconds()["scheduler"]
            await _wait_for_steps(observed, WINDOW_STEPS)
            after, cpu_after = await observed.step_totals(), observed.cpu_seconds()["scheduler"]
            passes = after.passes - before.passes
            handling.append((after.handling_s - before.handling_s) / passes * 1e6)
            process.append((cpu_after - cpu_before) / passes * 1e6)
        assert (await observed.state()).running_rows == rows, "windows are sized to end before the rows do"
    return [
        Figure.of("scheduler_step_cpu", f"scheduler, {rows} rows: handling of a step", handling, "µs", TARGET_US),
        Figure.of("scheduler_process_cpu", "… whole process, gRPC and protobuf included", process, "µs"),
    ]


async def _wait_for_steps(observed: ObservedPipeline, count: int) -> None:
    last = (await observed.state()).finished_steps + count
    await observed.wait_for(f"{count} steps", lambda state: state.finished_steps >= last, 0.05)


async def measure_memory(observed: ObservedPipeline) -> list[Figure]:
    """Hold increasing numbers of requests open while the scheduler is paused, and fit a line to the memory."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, prompt_form="ids"))
    sessions = random_sessions(COUNTS[-1], HELD_PROMPT_TOKENS, 8, name="memory")
    await bench.warm_up(8, 8, HELD_PROMPT_TOKENS, 8)
    await observed.pause()
    open_requests: list[asyncio.Task[object]] = []
    try:
        samples = [await _hold(observed, bench, sessions[:count], open_requests) for count in COUNTS]
    finally:
        for task in open_requests:
            task.cancel()
        await asyncio.gather(*open_requests, return_exceptions=True)
        await observed.resume()
        await bench.close()
    costs = {name: slope([sample[name] for sample in samples]) / 1024 for name in samples[0]}
    total = sum(costs.values())
    return [
        Figure.of("memory_per_request", "memory per open request, all services", [total], "KiB", TARGET_KIB),
        *(Figure.of(f"memory_{name}", f"… {name}", [cost], "KiB") for name, cost in costs.items()),
    ]


def slope(memory_bytes: list[int]) -> float:
    """Return the bytes that each request adds, by least squares over `COUNTS`."""
    return float(np.polyfit(COUNTS, memory_bytes, 1)[0])


async def _hold(
    observed: ObservedPipeline,
    bench: ServerUnderTest,
    sessions: list[WorkloadSession],
    open_requests: list[asyncio.Task[object]],
) -> dict[str, int]:
    """Open further requests until all `sessions` wait in the scheduler, and return each service's memory in bytes."""
    count = len(sessions)
    new = sessions[len(open_requests) :]
    open_requests += [asyncio.create_task(bench.client.send(session.requests[0])) for session in new]
    await observed.wait_for(f"{count} waiting requests", lambda state: state.waiting_requests == count)
    await asyncio.sleep(SETTLE_S)
    return observed.memory_bytes()
