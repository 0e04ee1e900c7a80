"""The time that the hops add to the first token of an idle server, and the time until an abort frees pages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from deploy.evaluation.bench.control_plane.figure import Figure
from deploy.evaluation.bench.control_plane.observed_pipeline import PipelineStateError
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.openai_stream import AnswerReader
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline
    from protos.gen.pando.v1 import scheduler_pb2

PROMPT_TOKENS = 32
REQUESTS_PER_REPEAT = 30
TARGET_ADDED_MS = 6.0
TARGET_ABORT_MS = 100.0
ABORTS_PER_REPEAT = 5
CHUNKS_BEFORE_LEAVING = 5
POLL_S = 0.001


async def measure_added_latency(observed: ObservedPipeline, repeats: int) -> list[Figure]:
    """Send one chat at a time and subtract the time of the worker's forward pass, by the worker's clock."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, endpoint="chat"))
    added: list[float] = []
    try:
        await bench.warm_up(5, 1, PROMPT_TOKENS, 4)
        for repeat in range(repeats):
            sessions = random_sessions(REQUESTS_PER_REPEAT, PROMPT_TOKENS, 4, name=f"latency/{repeat}")
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
            await observed.wait_for("the pages of an aborted request", is_idle, POLL_S)
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

    request = BenchRequest((Segment(f"abort/{number}", PROMPT_TOKENS),), output_tokens=4000)
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
