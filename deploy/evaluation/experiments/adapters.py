"""Costs of adapters: throughput of W1 with 0, 1, 8 and 64 of them, and first tokens of one that is not on the device.

Run as `python -m deploy.evaluation.experiments.adapters deploy/evaluation/shapes/llama-3.1-8b`, with
`--set model.load_format=dummy` where there are no weights.
Adapters are random; request i uses adapter i modulo their number. One deployment serves all passes, which take turns:
each round has one pass with each number of adapters. Figures are printed, and written, after each pass; no pass begins
that would end after `--time-limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from common.types import CacheMode
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.offline import evaluate
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time
from deploy.evaluation.bench.pipeline_client import PipelineClient, PipelineError, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.workloads.random_text import random_sessions
from deploy.evaluation.bench.workloads.w1 import TEMPERATURE, w1_requests
from deploy.evaluation.experiments.random_adapters import adapter_names, make_adapters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import ScheduleRequest
    from deploy.evaluation.bench.records import BenchRequest

COUNTS = (0, 1, 8, 64)
PROMPT_TOKENS = 128
FIRST_TOKENS = 10
# Of the pass that compiles the programs.
WARM_UP_SCALE = 0.1
# For first tokens after the last pass, and for stopping.
RESERVE_S = 15.0


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of adapters (0 1 8 64)")
    parser.add_argument("--rank", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="the first of W1's (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="W1's lengths times this (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of passes over the workload (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    deadline = Deadline.after(arguments.time_limit)
    # One event loop, as gRPC reports events to a closed one on standard error.
    with TemporaryDirectory(prefix="pando-adapters-") as folder, asyncio.Runner() as runner:
        began_at, most = time.monotonic(), max(arguments.counts)
        adapters = make_adapters(arguments.model, Path(folder), arguments.rank, max(most, 1) + FIRST_TOKENS)
        report(f"{len(adapters)} adapters written in {time.monotonic() - began_at:.1f} s")
        settings = (
            f"model.reference={arguments.model}",
            f"scheduler.adapters.slots={max(most, 1)}",
            "scheduler.adapters.tenant_share=1",
            f"scheduler.adapters.load={json.dumps(adapters)}",
        )
        began_at = time.monotonic()
        deployment = LaunchedDeployment(
            arguments.config, arguments.overrides, settings, start_timeout_s=deadline.left_s
        )
        try:
            with deployment:
                report(f"a deployment with {len(adapters)} adapters serves after {time.monotonic() - began_at:.1f} s")
                try:
                    runner.run(measure(arguments, deployment, deadline))
                except PipelineError as error:
                    raise LaunchError(f"{error}\n{deployment.last_lines()}") from error
        except LaunchError as error:
            report(str(error))
            return 1
    return 0


async def measure(arguments: argparse.Namespace, deployment: LaunchedDeployment, deadline: Deadline) -> None:
    """Run all passes, then single requests.

    Raises:
        PipelineError: a request failed, or did not end in time.
    """
    results = PartialResults("adapters", arguments.model.name, arguments.json)
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:

        async def run_pass(count: int, scale: float) -> float:
            requests = w1_requests(arguments.requests, scale)
            records = await client.start(adapted(requests, adapter_names(count)))
            await client.finish(deadline.left_s)
            return evaluate(requests, records).output_tokens_per_s

        for count in (0, max(arguments.counts)):
            began_at = time.monotonic()
            await run_pass(count, arguments.scale * WARM_UP_SCALE)
            report(f"warm-up with {count} adapters: {time.monotonic() - began_at:.1f} s")
        for count in within_time(list(arguments.counts) * arguments.repeats, deadline, RESERVE_S):
            results.add(f"W1, {count} adapters", "tok/s", [await run_pass(count, arguments.scale)])
        # No row has used these before, so they are in no slot.
        cold = adapter_names(max(*arguments.counts, 1) + FIRST_TOKENS)[-FIRST_TOKENS:]
        for title, names in (("in host memory", cold), ("on the device", cold[-1:] * FIRST_TOKENS)):
            times = [await first_token_ms(client, name, number, deadline) for number, name in enumerate(names)]
            results.add(f"first token, adapter {title}", "ms", times)


async def first_token_ms(client: PipelineClient, adapter: str, number: int, deadline: Deadline) -> float:
    """Return the milliseconds to the first token of a single request."""
    request = random_sessions(number + 1, PROMPT_TOKENS, 2, name="first token")[number].requests[0]
    records = await client.start(adapted([request], [adapter]))
    await client.finish(deadline.left_s)
    return (evaluate([request], records).first_token_s or 0.0) * 1e3


def adapted(requests: Sequence[BenchRequest], names: Sequence[str]) -> list[ScheduleRequest]:
    """Encode requests, which use the adapters in turns."""
    encoded = schedule_requests(requests, PromptMaker(), TEMPERATURE, CacheMode.NONE)
    if not names:
        return list(encoded)
    return [
        replace(each, options=replace(each.options, adapter=names[number % len(names)]))
        for number, each in enumerate(encoded)
    ]


if __name__ == "__main__":
    sys.exit(main())
