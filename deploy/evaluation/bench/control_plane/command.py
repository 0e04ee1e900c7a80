"""`pando bench control-plane`: the cost of everything except the model, with a worker that computes nothing."""

from __future__ import annotations

import asyncio
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import psutil
from rich.table import Table

from deploy.evaluation.bench.control_plane.measurements import (
    STEP_MS,
    measure_abort_latency,
    measure_added_latency,
    measure_memory,
    measure_pipeline,
    measure_scheduler_step,
)
from deploy.evaluation.bench.control_plane.observed_pipeline import ObservedPipeline, PipelineStateError
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.pipeline_client import PipelineError
from deploy.evaluation.bench.report import output_console, print_failure, spread_text
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_int
from deploy.evaluation.bench.target import TargetError
from deploy.supervisor.layout import free_port

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Sequence

    from deploy.evaluation.bench.control_plane.measurements import Figure

    Measure = Callable[[ObservedPipeline], Awaitable[list[Figure]]]

IDLE_STEP_MS = 2.0
OPEN_FILES = 8192
PARTS = ("step", "pipeline", "latency", "abort", "memory")


def add_control_plane_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench control-plane`."""
    parser.add_argument("--rows", type=positive_int, default=256, help="concurrently decoding rows (%(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=5, help="per figure (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure; default: all")
    add_setting_arguments(parser)
    add_result_arguments(parser)


def run_control_plane(arguments: argparse.Namespace) -> int:
    """Measure each group of parts in a separate deployment; return the exit code."""
    console = output_console()
    allow_open_files(OPEN_FILES)
    figures: list[Figure] = []
    model = ""
    try:
        for step_ms, measures in plan_parts(arguments):
            part, model = _measure_in_deployment(arguments, step_ms, measures)
            figures += part
    except (LaunchError, PipelineError, PipelineStateError, TargetError, grpc.RpcError, psutil.Error) as error:
        print_failure("pando bench control-plane", error)
        return 2
    console.print(figure_table(figures, f"control plane, {arguments.rows} rows, {model}; median (least-largest)"))
    if arguments.json is not None:
        sheet = ResultSheet("control-plane", model, 1, Provenance.collect(sys.argv[1:]), arguments.label)
        for figure in figures:
            sheet.add_spread(figure.metric, figure.spread, figure.unit)
        write_results(arguments.json, sheet.results)
    return 0


def plan_parts(arguments: argparse.Namespace) -> list[tuple[float, list[Measure]]]:
    """Return, for each deployment to start, the duration of its steps in milliseconds and its measurements."""
    repeats = arguments.repeats
    idle: dict[str, Measure] = {
        "latency": lambda observed: measure_added_latency(observed, repeats),
        "abort": lambda observed: measure_abort_latency(observed, repeats),
    }
    groups: list[tuple[float, dict[str, Measure]]] = [
        (STEP_MS, {"step": lambda observed: measure_scheduler_step(observed, arguments.rows, repeats)}),
        (0.0, {"pipeline": lambda observed: measure_pipeline(observed, repeats)}),
        (IDLE_STEP_MS, idle),
        # In a new deployment: a process that was busy before frees memory while requests allocate some.
        (IDLE_STEP_MS, {"memory": measure_memory}),
    ]
    chosen = [(ms, [measure for part, measure in parts.items() if part in arguments.only]) for ms, parts in groups]
    return [(ms, measures) for ms, measures in chosen if measures]


def figure_table(figures: Sequence[Figure], title: str) -> Table:
    """Return the figures as a table, with their targets."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "measured", "unit", "target"):
        table.add_column(heading, justify="left" if heading in ("", "unit") else "right")
    for figure in figures:
        decimals = 0 if figure.spread.median >= 1000 else 1
        target = "" if figure.target is None else f"≤ {figure.target:g}"
        style = {None: None, True: "green", False: "red"}[figure.is_met]
        table.add_row(figure.name, spread_text(figure.spread, decimals), figure.unit, target, style=style)
    return table


def allow_open_files(count: int) -> None:
    """Raise the limit of open files for this process and its children: every open request is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _measure_in_deployment(
    arguments: argparse.Namespace, step_ms: float, measures: Sequence[Measure]
) -> tuple[list[Figure], str]:
    defaults = (
        "model.load_format=fake",
        f"scheduler.max_rows={arguments.rows}",
        f"scheduler.metrics_port={free_port('127.0.0.1')}",
    )
    with LaunchedDeployment(arguments.config, arguments.overrides, defaults, fake_step_ms=step_ms) as deployment:

        async def measure_all() -> list[Figure]:
            async with ObservedPipeline(deployment) as observed:
                return [figure for measure in measures for figure in await measure(observed)]

        return asyncio.run(measure_all()), deployment.model
