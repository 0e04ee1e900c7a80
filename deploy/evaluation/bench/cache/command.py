"""`pando bench cache`: the prefix cache alone, with a million simulated requests and no model."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.evaluation.bench.cache.arrivals import by_time
from deploy.evaluation.bench.cache.report import cache_table, cost_table, sheet_of
from deploy.evaluation.bench.cache.simulation import CacheSimulation, Machine
from deploy.evaluation.bench.cache.tally import Rules, Tally
from deploy.evaluation.bench.report import output_console, print_failure
from deploy.evaluation.bench.results import Provenance, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_float, positive_int
from deploy.evaluation.bench.workloads.ideal import IdealCache
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_stream
from deploy.evaluation.bench.workloads.trace import TraceOptions, trace_stream
from services.scheduler.cache.config import CacheConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from deploy.evaluation.bench.cache.tally import CacheFigures
    from deploy.evaluation.bench.records import WorkloadSession
    from services.scheduler.cache.factory import CacheName

MODES: tuple[CacheName, ...] = ("shared", "isolated", "isolated_pinned", "user_aware")


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench cache`."""
    machine, shape = Machine(), M1Shape()
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    parser.add_argument("--requests", type=positive_int, default=1_000_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake format, instead of M1")
    parser.add_argument("--trace-speed", type=positive_float, default=1.0, help="2 is twice as fast (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=2, help="modes simulated at the same time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    m1 = parser.add_argument_group("M1")
    m1.add_argument("--users", type=positive_int, default=shape.users, help="(%(default)s)")
    m1.add_argument("--apps", type=positive_int, default=shape.apps, help="(%(default)s)")
    m1.add_argument("--rate", type=positive_float, default=10.0, metavar="R", help="requests/s (%(default)s)")
    m1.add_argument("--burstiness", type=positive_float, default=1.0, metavar="CV", help="1: Poisson (%(default)s)")
    m1.add_argument("--scale", type=positive_float, default=1.0, help="factor on lengths (%(default)s)")
    group = parser.add_argument_group("machine")
    group.add_argument("--device-pages", type=positive_int, default=machine.device_pages, help="(%(default)s)")
    group.add_argument("--page-size", type=positive_int, default=machine.page_size, help="(%(default)s)")
    group.add_argument("--epoch-seconds", type=positive_float, default=machine.epoch_seconds, help="(%(default)s)")
    group.add_argument("--promotion-subjects", type=positive_int, default=3, help="k (%(default)s)")
    group.add_argument(
        "--promotion-epochs", type=positive_int, default=CacheConfig().promotion_epochs, help="(%(default)s)"
    )
    add_result_arguments(parser)


def run_cache(arguments: argparse.Namespace) -> int:
    """Simulate all modes; return the exit code: 1 if a mode other than shared found tokens without evidence."""
    console, progress = output_console(), Console(stderr=True)
    try:
        # Not forked, as this process may have threads.
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            tasks = {mode: pool.submit(simulate, arguments, mode) for mode in arguments.modes}
            for task in as_completed(tasks.values()):
                mode = next(mode for mode, each in tasks.items() if each is task)
                progress.print(f"{mode} is done", style="dim", highlight=False)
            figures = {mode: task.result() for mode, task in tasks.items()}
    except (ValueError, OSError) as error:
        print_failure("pando bench cache", error)
        return 2
    console.print(cache_table(figures, workload_name(arguments)))
    console.print(cost_table(figures))
    if arguments.json is not None:
        provenance = Provenance.collect(sys.argv[1:])
        for mode, shown in figures.items():
            sheet = sheet_of(mode, shown, figures.get("shared"), f"cache-{workload_name(arguments)}", provenance)
            write_results(arguments.json, sheet.results)
    return int(any(shown.crossing_tokens for mode, shown in figures.items() if mode != "shared"))


def workload_name(arguments: argparse.Namespace) -> str:
    """Return the benchmark's name for results; runs with other numbers of requests or pages are other benchmarks."""
    name = "m1" if arguments.trace is None else f"trace-{arguments.trace.name.partition('.')[0]}"
    return f"{name}-{arguments.requests}-requests-{arguments.device_pages}-pages"


def simulate(arguments: argparse.Namespace, mode: CacheName) -> CacheFigures:
    """Simulate one mode and return its figures.

    Raises:
        ValueError: the shape or the trace is invalid.
        OSError: the trace cannot be read.
    """
    machine = Machine(
        device_pages=arguments.device_pages, page_size=arguments.page_size, epoch_seconds=arguments.epoch_seconds
    )
    config = CacheConfig(promotion_subjects=arguments.promotion_subjects, promotion_epochs=arguments.promotion_epochs)
    rules = Rules(by_evidence=mode in ("shared", "user_aware"), by_pins=mode == "isolated_pinned")
    tally = Tally(rules, IdealCache(keeps_answers=True, promotion_subjects=config.promotion_subjects))
    simulation = CacheSimulation(mode, machine, config, tally)
    arrivals = by_time(_sessions(arguments), machine.token_s)
    simulation.run(islice(arrivals, arguments.requests))
    return tally.figures(simulation)


def _sessions(arguments: argparse.Namespace) -> Iterator[WorkloadSession]:
    if arguments.trace is not None:
        return trace_stream(arguments.trace, TraceOptions(count=arguments.requests, speed=arguments.trace_speed))
    shape = M1Shape(users=arguments.users, apps=arguments.apps, scale=arguments.scale)
    return m1_stream(shape, arguments.rate, arguments.burstiness, arguments.seed)
