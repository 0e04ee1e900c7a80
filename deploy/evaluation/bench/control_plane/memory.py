"""Memory per open request in all services together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from deploy.evaluation.bench.control_plane.figure import Figure
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline
    from deploy.evaluation.bench.records import WorkloadSession

PROMPT_TOKENS = 256
# One-time allocations are included at every count, so the slope over the counts is the memory per request.
COUNTS = (128, 256, 384, 512, 640)
SETTLE_S = 0.5
TARGET_KIB = 64.0


async def measure_memory(observed: ObservedPipeline) -> list[Figure]:
    """Hold increasing numbers of requests open while the scheduler is paused, and fit a line to the memory."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, prompt_form="ids"))
    sessions = random_sessions(COUNTS[-1], PROMPT_TOKENS, 8, name="memory")
    await bench.warm_up(8, 8, PROMPT_TOKENS, 8)
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
