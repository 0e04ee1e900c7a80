"""`pando bench serve`: runs one load against any OpenAI-compatible server and reports its figures."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from deploy.evaluation.bench.figures import summarize
from deploy.evaluation.bench.measure import ServerUnderTest
from deploy.evaluation.bench.report import (
    RequestProgress,
    load_results,
    load_table,
    output_console,
    print_errors,
    print_failure,
)
from deploy.evaluation.bench.results import Provenance, ResultSheet, short_model, write_results
from deploy.evaluation.bench.serve_arguments import build_sessions, is_open_loop, target_options
from deploy.evaluation.bench.target import TargetError
from deploy.evaluation.bench.workloads.ideal import ideal_rates

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from deploy.evaluation.bench.figures import LoadFigures
    from deploy.evaluation.bench.records import LoadResult, WorkloadSession

DEFAULT_CONCURRENCY = 8


def run_serve(arguments: argparse.Namespace) -> int:
    """Run the load that `arguments` describe; return the exit code."""
    console = output_console()
    try:
        sessions = build_sessions(arguments)
        model, result = asyncio.run(_measure(arguments, sessions))
    except (TargetError, ValueError, OSError) as error:
        print_failure("pando bench serve", error)
        return 2
    figures = summarize(result)
    title = f"{arguments.workload}, {_describe_loop(arguments)}, {short_model(model)}"
    # Later prompts do not contain the real server's answers.
    ideal = ideal_rates((request for session in sessions for request in session.requests), keeps_answers=False)
    console.print(load_table(figures, title, ideal))
    print_errors(console, result)
    if arguments.json is not None:
        sheet = ResultSheet(
            f"serve-{arguments.workload}",
            model,
            arguments.tp,
            Provenance.collect([*sys.argv[1:], "--seed", str(arguments.seed)]),
            arguments.label,
        )
        load_results(sheet, figures, ideal)
        write_results(arguments.json, sheet.results)
    return exit_code(figures)


def exit_code(figures: LoadFigures) -> int:
    """Return 1 if all requests failed; under overload, which is often measured on purpose, some may fail."""
    return int(figures.requests > 0 and figures.failed == figures.requests)


async def _measure(arguments: argparse.Namespace, sessions: Sequence[WorkloadSession]) -> tuple[str, LoadResult]:
    bench = await ServerUnderTest.connect(target_options(arguments))
    try:
        concurrency = arguments.concurrency or DEFAULT_CONCURRENCY
        if arguments.warmup:
            first = sessions[0].requests[0]
            await bench.warm_up(
                arguments.warmup, min(concurrency, arguments.warmup), first.input_tokens, min(16, first.output_tokens)
            )
        with RequestProgress(sum(len(session.requests) for session in sessions)) as progress:
            if is_open_loop(arguments):
                return bench.model, await bench.open_loop(sessions, progress.on_record)
            return bench.model, await bench.closed_loop(sessions, concurrency, progress.on_record)
    finally:
        await bench.close()


def _describe_loop(arguments: argparse.Namespace) -> str:
    if arguments.rate is not None:
        return f"{arguments.rate:g} requests/s, CV {arguments.burstiness:g}"
    if is_open_loop(arguments):
        return f"as recorded × {arguments.trace_speed:g}"
    return f"{arguments.concurrency or DEFAULT_CONCURRENCY} at a time"
