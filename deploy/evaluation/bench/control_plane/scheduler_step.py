"""Processor time of the scheduler per decode step, with all rows running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import CacheMode
from deploy.evaluation.bench.control_plane.figure import Figure
from deploy.evaluation.bench.pipeline_client import PipelineClient, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline

# About the duration of a step of an 8B model with this many rows on a GPU, and long enough for the other services,
# which share the processor, to finish the previous step.
STEP_MS = 10.0
PROMPT_TOKENS = 64
WINDOW_STEPS = 60
TARGET_US = 400.0


async def measure_scheduler_step(observed: ObservedPipeline, rows: int, repeats: int) -> list[Figure]:
    """Keep `rows` rows decoding and divide the scheduler's time by the number of steps, in `repeats` windows."""
    steps = WINDOW_STEPS * (repeats + 1) + 100
    requests = [session.requests[0] for session in random_sessions(rows, PROMPT_TOKENS, steps, name="step")]
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
