"""`pando bench offline`: throughput of scheduler, workers and detokenizer, with token ids over gRPC as input."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from common.errors import ConfigurationError
from common.types import CacheMode
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.pipeline_client import PipelineClient, PipelineError, PipelineRecord, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.report import NOT_REPORTED, following_tokens, output_console, print_failure, spread_text
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_float, positive_int
from deploy.evaluation.bench.workloads.random_text import random_sessions
from deploy.evaluation.bench.workloads.w1 import TEMPERATURE, w1_requests
from deploy.supervisor.state import find_state

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from deploy.evaluation.bench.records import BenchRequest

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """The figures of one pass over the workload."""

    duration_s: float
    input_tokens: int
    output_tokens: int
    expected_tokens: int
    cached_tokens: int
    first_token_s: float | None
    """Median over the requests, from the submission of all."""
    decode_rate: float | None
    """Median output rate of a row after its first token, tokens per second."""

    @property
    def output_tokens_per_s(self) -> float:
        """Output rate of the whole pass, the figure that other projects publish."""
        return self.output_tokens / self.duration_s


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench offline`."""
    parser.add_argument("--workload", choices=("w1", "batch1", "random"), default="w1", help="(%(default)s)")
    parser.add_argument("--requests", type=positive_int, metavar="N", help="w1: the first N of 256; random: N (64)")
    parser.add_argument("--scale", type=positive_float, default=1.0, help="w1: lengths times this (%(default)s)")
    parser.add_argument("--input-tokens", type=positive_int, default=128, help="batch1, random (%(default)s)")
    parser.add_argument("--output-tokens", type=positive_int, default=512, help="batch1, random (%(default)s)")
    parser.add_argument("--temperature", type=float, help="default: 0.6 for w1, 0 for others")
    parser.add_argument("--no-cache", action="store_true", help="do not use the prefix cache")
    parser.add_argument("--repeats", type=positive_int, default=1, help="passes over the workload (%(default)s)")
    parser.add_argument("--timeout", type=positive_float, default=3600.0, metavar="S", help="per pass (%(default)s)")
    services = parser.add_argument_group("services")
    services.add_argument(
        "--scheduler", metavar="ADDRESS", help="host:port or unix:path; default: the local deployment"
    )
    services.add_argument("--detokenizer", metavar="ADDRESS", help="likewise")
    services.add_argument("--port", type=int, help="selects a deployment by its HTTP port, if several run here")
    services.add_argument("--launch", action="store_true", help="start a deployment and stop it afterwards")
    services.add_argument("--model", help="name for the results; default: the deployment's")
    add_setting_arguments(parser)
    add_result_arguments(parser)


def run_offline(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit code."""
    console = output_console()
    deployment = None
    try:
        requests = build_requests(arguments)
        if arguments.launch:
            deployment = LaunchedDeployment(arguments.config, arguments.overrides, ranks=arguments.tp)
        with deployment or nullcontext():
            if deployment is not None:
                addresses = (deployment.address_of("scheduler"), deployment.address_of("detokenizer"))
                model = arguments.model or deployment.model
            else:
                addresses, model = find_pipeline(arguments)
            runs = asyncio.run(_measure(arguments, requests, addresses))
    except (PipelineError, ConfigurationError, LaunchError, ValueError) as error:
        print_failure("pando bench offline", error)
        return 2
    console.print(_table(runs, f"{arguments.workload}, {len(requests)} requests, {model}"))
    if arguments.json is not None:
        write_results(arguments.json, _sheet(arguments, model, runs).results)
    return int(any(run.output_tokens != run.expected_tokens for run in runs))


def build_requests(arguments: argparse.Namespace) -> list[BenchRequest]:
    """Return the workload's requests.

    Raises:
        ValueError: a flag is invalid for the workload.
    """
    if arguments.workload == "w1":
        return w1_requests(arguments.requests or 256, arguments.scale)
    count = 1 if arguments.workload == "batch1" else arguments.requests or 64
    sessions = random_sessions(count, arguments.input_tokens, arguments.output_tokens, name=arguments.workload)
    return [session.requests[0] for session in sessions]


def find_pipeline(arguments: argparse.Namespace) -> tuple[tuple[str, str], str]:
    """Return the addresses of scheduler and detokenizer, and the model's name.

    Raises:
        ConfigurationError: only one address is given; or none, and not exactly one deployment runs here, or it serves
            several models and none is selected.
    """
    if arguments.scheduler and arguments.detokenizer:
        return (arguments.scheduler, arguments.detokenizer), arguments.model or "unknown"
    if arguments.scheduler or arguments.detokenizer:
        raise ConfigurationError("give both --scheduler and --detokenizer, or neither")
    state = find_state(port=arguments.port)
    model = arguments.model if len(state.models) > 1 else None
    addresses = (state.address_of("scheduler", model), state.address_of("detokenizer", model))
    return addresses, arguments.model or state.model


async def _measure(
    arguments: argparse.Namespace, requests: Sequence[BenchRequest], addresses: tuple[str, str]
) -> list[OfflineRun]:
    temperature = arguments.temperature
    if temperature is None:
        temperature = TEMPERATURE if arguments.workload == "w1" else 0.0
    cache_mode = CacheMode.NONE if arguments.no_cache else CacheMode.DEFAULT
    prompts = PromptMaker()
    async with PipelineClient(*addresses) as client:
        warm_up = random_sessions(WARM_UP_REQUESTS, WARM_UP_TOKENS, WARM_UP_TOKENS, name="warm-up")
        first = [session.requests[0] for session in warm_up]
        runs: list[OfflineRun] = []
        for batch in (first, *[requests] * arguments.repeats):
            encoded = schedule_requests(batch, prompts, temperature, cache_mode)
            records = await client.start(encoded)
            async with following_tokens(records, sum(request.output_tokens for request in batch)):
                await client.finish(arguments.timeout)
            runs.append(evaluate(batch, records))
        return runs[1:]


def evaluate(requests: Sequence[BenchRequest], records: Sequence[PipelineRecord]) -> OfflineRun:
    """Return the figures of one pass.

    Raises:
        PipelineError: a request failed, or none had output.
    """
    for record in records:
        if record.failure is not None:
            raise PipelineError(f"a request failed: {record.failure}")
    last = max((record.last_s for record in records if record.last_s is not None), default=None)
    if last is None:
        raise PipelineError("no request had output")
    firsts = [record.first_s - record.submitted_s for record in records if record.first_s is not None]
    rates = [rate for record in records if (rate := record.decode_tokens_per_s) is not None]
    return OfflineRun(
        duration_s=last - min(record.submitted_s for record in records),
        input_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=sum(record.tokens for record in records),
        expected_tokens=sum(request.output_tokens for request in requests),
        cached_tokens=sum(record.cached_tokens for record in records),
        first_token_s=median(firsts) if firsts else None,
        decode_rate=median(rates) if rates else None,
    )


def _table(runs: Sequence[OfflineRun], title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    last = runs[-1]
    table.add_row("output tokens/s", spread_text(Spread.of([run.output_tokens_per_s for run in runs]), 1))
    table.add_row("duration, s", spread_text(Spread.of([run.duration_s for run in runs]), 2))
    table.add_row("tokens in, out", f"{last.input_tokens:,}, {last.output_tokens:,}")
    if last.output_tokens != last.expected_tokens:
        table.add_row("tokens out, requested", f"{last.expected_tokens:,}", style="red")
    table.add_row("tokens in from the cache", f"{last.cached_tokens:,}")
    table.add_row("median time to first token, ms", _spread_of([run.first_token_s for run in runs], 1000))
    table.add_row("median decode per row, tokens/s", _spread_of([run.decode_rate for run in runs], 1))
    return table


def _spread_of(values: Sequence[float | None], factor: float) -> str:
    known = [value * factor for value in values if value is not None]
    return spread_text(Spread.of(known), 1) if known else NOT_REPORTED


def _sheet(arguments: argparse.Namespace, model: str, runs: Sequence[OfflineRun]) -> ResultSheet:
    benchmark = arguments.workload
    if benchmark == "w1" and (arguments.requests is not None or arguments.scale != 1.0):
        benchmark = "w1-part"  # must not be mistaken for the whole workload
    sheet = ResultSheet(benchmark, model, arguments.tp, Provenance.collect(sys.argv[1:]), arguments.label)
    sheet.add_spread("output_throughput", Spread.of([run.output_tokens_per_s for run in runs]), "tok/s")
    firsts = [run.first_token_s * 1000 for run in runs if run.first_token_s is not None]
    rates = [run.decode_rate for run in runs if run.decode_rate is not None]
    if firsts:
        sheet.add_spread("ttft_p50", Spread.of(firsts), "ms")
    if rates:
        sheet.add_spread("decode_per_row_p50", Spread.of(rates), "tok/s")
    sheet.add("output_tokens", runs[-1].output_tokens, "tokens")
    sheet.add("input_tokens", runs[-1].input_tokens, "tokens")
    return sheet
