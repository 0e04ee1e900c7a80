"""The cost of the whole pipeline per token, from HTTP request to server-sent events, without a model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deploy.evaluation.bench.control_plane.figure import Figure
from deploy.evaluation.bench.control_plane.observed_pipeline import PipelineStateError
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 256
STREAMS = 64
WAVES = 3


async def measure_pipeline(observed: ObservedPipeline, repeats: int) -> list[Figure]:
    """Stream at full speed; report tokens per second, and per second of processor time."""
    bench = await ServerUnderTest.connect(TargetOptions(observed.url, prompt_form="ids"))
    rates: list[float] = []
    per_core: list[float] = []
    shares: dict[str, list[float]] = {}
    client: list[float] = []
    batching: list[float] = []
    try:
        await bench.warm_up(STREAMS, STREAMS, PROMPT_TOKENS, 16)
        for repeat in range(repeats):
            sessions = random_sessions(STREAMS * WAVES, PROMPT_TOKENS, OUTPUT_TOKENS, name=f"pipeline/{repeat}")
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
